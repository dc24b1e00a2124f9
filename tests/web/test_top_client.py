"""Error messages of the client of `lmcache-async top`."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_async.cli.top import StatusClient
from lmcache_async.errors import ConfigError, TierUnavailableError
from tests.fuzz.damage import bounded_memory
from tests.support.certificates import Authority
from tests.support.secret_files import secret_file
from tests.web.serving import served
from tests.web.top_calls import call


@contextlib.contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that passes each connection to `serve`. Yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)


def test_no_answer_is_an_error_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, shown = call(f"127.0.0.1:{port}", "--once")

    assert code == 1
    assert f"no server answers at http://127.0.0.1:{port}/status.json: Connection refused" in shown
    assert "Traceback" not in shown

    _, shown = call(f"http://u:secret@127.0.0.1:{port}", "--once")
    assert f"no server answers at http://***@127.0.0.1:{port}/status.json" in shown


@pytest.mark.parametrize("interval", ["inf", "nan", "1e12", "0"])
def test_an_interval_that_cannot_be_waited_for_is_refused(interval: str) -> None:
    code, shown = call("127.0.0.1:1", "--interval", interval)

    assert code == 2
    assert "'--interval': Input should be" in shown


def test_the_certificate_of_an_authority_in_ssl_cert_file_is_accepted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with served(**{"http.tls_cert_file": str(authority.issue("server"))}) as engine:
        code, shown = call(engine.url, "--once", "--json")
        assert code == 2
        assert "cannot be trusted" in shown
        assert "set SSL_CERT_FILE" in shown

        code, shown = call(engine.url, "--once", "--json", SSL_CERT_FILE=str(authority.file))
        assert (code, '"tiers"' in shown) == (0, True), shown


@pytest.mark.parametrize(
    ("scheme", "answer", "code", "says"),
    [
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 2, "not a status page of lmcache-async"),
        (
            "http",
            b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"kind":[]}',
            2,
            "not a status page of lmcache-async",
        ),
        (
            "http",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
            2,
            "not a status page of lmcache-async",
        ),
        ("http", b"HTTP/1.1 200 OK\r\n\r\n" + b'{"kind":' * 100_000, 2, "not a status page"),
        ("http", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 2, "answered 404"),
        ("http", b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", 1, "answered 503"),
        ("http", b"-ERR unknown command\r\n\r\n", 2, "does not speak HTTP"),
        ("http", b"SSH-2.0", 1, "no server answers"),
        ("http", b"", 1, "no server answers"),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 1, "no server answers"),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 1, "no server answers"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", 1, "wrong version number"),
    ],
    ids=range(12),
)
def test_another_server_is_an_error_message(scheme: str, answer: bytes, code: int, says: str) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with answering(serve) as port:
        found = call(f"{scheme}://127.0.0.1:{port}/", "--once")

    assert found[0] == code, found
    assert says in found[1]


def test_a_compressed_answer_does_not_fill_the_memory() -> None:
    bomb = gzip.compress(gzip.compress(bytes(32 << 20)))
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
    received = b""

    def serve(connection: socket.socket) -> None:
        nonlocal received
        received = connection.recv(65536)
        connection.sendall(head.encode() + bomb)

    with answering(serve) as port:
        call(f"127.0.0.1:{port}", "--once")  # imports
        with bounded_memory(8 << 20):
            code, shown = call(f"127.0.0.1:{port}", "--once")

    assert code == 2
    assert "not a status page of lmcache-async" in shown
    assert b"accept-encoding: identity" in received.lower()


@pytest.mark.parametrize(
    "part", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "]
)
def test_a_slow_response_has_one_deadline(part: bytes) -> None:
    """Headers or a body that arrive byte by byte do not extend the deadline."""
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(part)
        while not ended.wait(0.02):
            connection.sendall(b"x")

    with answering(drip) as port:
        with pytest.raises(TierUnavailableError, match=r"no answer in 0\.3 s"):
            StatusClient(f"127.0.0.1:{port}", timeout_s=0.3).read()
        ended.set()


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
    file = secret_file(tmp_path, "a-token-of-many-characters\n", 0o644)
    with pytest.raises(ConfigError, match=r"--token-file: .*all users may read it"):
        StatusClient("http://127.0.0.1:1", token_file=file)


def test_the_path_of_the_page_is_kept() -> None:
    assert StatusClient("http://a/engines/3/").path == "/engines/3/status.json"
    assert StatusClient("http://a/engines/3/status.json").path == "/engines/3/status.json"
    assert StatusClient("http://a").path == "/status.json"
    assert StatusClient("http://a/ü b%20c/").path == "/%C3%BC%20b%20c/status.json"
    assert StatusClient("http://a/\udcff/").path == "/%FF/status.json"
