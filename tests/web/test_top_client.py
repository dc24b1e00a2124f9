"""Error messages of the client of `lmcache-async top`."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from lmcache_async.cli.top import StatusClient, StatusError
from tests.web.top_calls import call


def test_no_answer_is_an_error_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, shown = call(f"127.0.0.1:{port}", "--once")

    assert code == 1
    assert f"nothing answers at http://127.0.0.1:{port}: Connection refused" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 2, "not a status page of lmcache-async"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 2, "not a status page of lmcache-async"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 2, "answered 404"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", 1, "answered 503"),
        (b"-ERR unknown command\r\n\r\n", 2, "does not speak HTTP"),
        (b"-ERR unknown command\r\n", 2, "does not speak HTTP"),
        (b"SSH-2.0", 2, "does not speak HTTP"),
        (b"HTTP/1.1", 1, "nothing answers"),
        (b"", 1, "nothing answers"),
    ],
)
def test_another_server_is_an_error_message(answer: bytes, code: int, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        found = call(f"http://127.0.0.1:{server.getsockname()[1]}/", "--once")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)

    assert found[0] == code, found
    assert says in found[1]


def test_https_at_a_port_without_tls_is_an_error_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        code, shown = call(f"https://127.0.0.1:{server.getsockname()[1]}/", "--once")
        thread.join(30)

    assert code == 1
    assert "wrong version number" in shown


@pytest.mark.parametrize(
    "part", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "]
)
def test_a_slow_response_has_one_deadline(part: bytes) -> None:
    """Headers or a body that arrive byte by byte do not extend the deadline."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(part)
                for _ in range(300):  # six seconds, where nobody ends it
                    connection.sendall(b"x")
                    if ended.wait(0.02):
                        break

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(StatusError, match=r"gave no answer in 0\.3 s"):
                StatusClient(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3).read()
            alive = thread.is_alive()
        finally:
            ended.set()
            thread.join(30)

    assert alive, "it was the server that ended it"


def test_a_deeply_nested_answer_is_not_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self):
        return 200, b'{"kind":' * 100_000

    monkeypatch.setattr(StatusClient, "_get", answer)
    with pytest.raises(StatusError, match="not a status page"):
        StatusClient("http://a").read()


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a", "http://", "http://a:b", "http://[::1", ""),
        *("http://a..b:1", f"http://{'a' * 64}:1", "http://a b:1", "http://\udcff:1"),
    ],
)
def test_an_invalid_address_is_an_error_message(url: str) -> None:
    code, shown = call(url, "--once")

    assert code == 2
    assert "expected an address such as http://127.0.0.1:7421" in shown


def test_a_token_file_readable_by_all_is_rejected(tmp_path: Path) -> None:
    (file := tmp_path / "tokens").write_text("a-token-of-many-characters\n")
    file.chmod(0o644)
    with pytest.raises(StatusError, match=r"--token-file: .*all users may read it"):
        StatusClient("http://127.0.0.1:1", token_file=file)


def test_the_path_of_the_page_is_kept() -> None:
    assert StatusClient("http://a/engines/3/").path == "/engines/3/status.json"
    assert StatusClient("http://a/engines/3/status.json").path == "/engines/3/status.json"
    assert StatusClient("http://a").path == "/status.json"
    assert StatusClient("http://a/ü b%20c/").path == "/%C3%BC%20b%20c/status.json"
    assert StatusClient("http://a/\udcff/").path == "/%FF/status.json"
