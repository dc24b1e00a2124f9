"""The status server on real sockets: responses, limits and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lmcache_async.config import HTTPConfig
from lmcache_async.errors import ConfigError
from lmcache_async.metrics import http
from lmcache_async.metrics.endpoint import status_server
from lmcache_async.metrics.server import StatusServer
from lmcache_async.testing.conformance.base import in_time
from lmcache_async.testing.steps import turns
from tests.support.certificates import Authority
from tests.support.http_client import DEADLINE_S, ask
from tests.support.secret_files import secret_file
from tests.web.fake_source import FakeSource

TOKEN = "a-token-of-many-characters"
PAGE = Path(http.__file__).parent / "page"
SCRIPTS = tuple(f"/{path.name}" for path in sorted(PAGE.glob("*.js")))
PATHS = ("/", "/style.css", *SCRIPTS, "/status.json", "/metrics", "/healthz")


def config(**options: object) -> HTTPConfig:
    return HTTPConfig.model_validate({"listen": "127.0.0.1:0", **options})


def serve(source: FakeSource | None = None, **options: object) -> StatusServer:
    return status_server(source or FakeSource(), config(**options))


async def test_each_path_has_its_content_type_and_no_external_resource() -> None:
    async with serve() as server:
        heard = {path: await ask(server.url, path) for path in PATHS}

    assert {path: one.status for path, one in heard.items()} == dict.fromkeys(PATHS, 200)
    types = {path: one.headers["Content-Type"].partition(";")[0] for path, one in heard.items()}
    assert types == {
        "/": "text/html",
        "/style.css": "text/css",
        **dict.fromkeys(SCRIPTS, "text/javascript"),
        "/status.json": "application/json",
        "/metrics": "text/plain",
        "/healthz": "text/plain",
    }
    for one in heard.values():
        assert "default-src 'none'" in one.headers["Content-Security-Policy"]
        assert "unsafe" not in one.headers["Content-Security-Policy"]
        assert one.headers["X-Content-Type-Options"] == "nosniff"
        assert one.headers["Cache-Control"] == "no-store"
        assert one.headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in one.headers
        assert int(one.headers["Content-Length"]) == len(one.body)
    for path in ("/", "/style.css", *SCRIPTS):
        # A namespace, not an address.
        text = heard[path].body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text
    assert heard["/metrics"].body == b"fake_total 1\n"
    assert heard["/healthz"].body == b"ok\n"


async def test_unknown_paths_methods_and_long_requests_are_rejected(caplog: pytest.LogCaptureFixture) -> None:
    """A body is not read, and an answer to HEAD has none. Clients cannot fill the log."""
    async with serve() as server:
        for path in (
            "/index.html",
            "/../pyproject.toml",
            "/page/",
            "/status.json/",
            "//etc/passwd",
            "/%2e%2e/x",
        ):
            assert (await ask(server.url, path)).status == 404, path
        assert (await ask(server.url, "/" + "x" * 20000)).status == 400
        assert (await ask(server.url, "/", headers={"X": "y" * 50000})).status == 400
        head = await ask(server.url, "/status.json", method="HEAD")
        post = await ask(server.url, "/", method="POST", headers={"Content-Length": "1000000"})

    assert (head.status, head.body) == (200, b"")
    assert post.status == 405
    assert [entry.message for entry in caplog.records if entry.levelno > logging.INFO] == []


async def test_requests_for_another_host_name_are_rejected() -> None:
    async with serve() as server:
        for host in ("evil.example", f"evil.example:{urlsplit(server.url).port}", ""):
            heard = await ask(server.url, "/status.json", headers={"Host": host})
            assert heard.status == 421
            assert b"kind" not in heard.body


async def test_beyond_the_loopback_a_token_is_required_and_any_host_name_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(listen="0.0.0.0:0", token_file=secret_file(tmp_path, TOKEN)) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        silent = {path: (await ask(url, path)) for path in (*PATHS, "/nothing")}
        wrong = await ask(url, "/status.json", headers={"Authorization": "Bearer x" + TOKEN})
        headers = {"Host": "node-7.example:7421", "Authorization": f"Bearer {TOKEN}"}
        right = await ask(url, "/status.json", headers=headers)

    assert {path for path, one in silent.items() if one.status != 401} == {"/healthz"}
    assert silent["/"].headers["WWW-Authenticate"].startswith("Basic ")
    assert (wrong.status, right.status) == (401, 200)
    assert [record for record in caplog.records if "not encrypted" in record.getMessage()]


@pytest.mark.parametrize("listen", ["0.0.0.0:7421", "10.0.0.7:7421", "node-7:7421", "[::]:7421"])
def test_beyond_the_loopback_a_token_file_is_required(listen: str) -> None:
    with pytest.raises(ValueError, match="token_file"):
        config(listen=listen)


async def test_a_certificate_enables_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serve(tls_cert_file=authority.issue("server")) as server:
        heard = await ask(server.url, "/healthz", tls=ssl.create_default_context(cafile=authority.file))
        assert server.url.startswith("https://")

    assert heard.body == b"ok\n"
    locked = authority.issue("locked", password=b"secret")
    with pytest.raises(ConfigError, match="they cannot be used: the key has a password"):
        await serve(tls_cert_file=locked).__aenter__()
    (broken := tmp_path / "broken.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=rf"tls_cert_file: {broken}, .* they cannot be used: "):
        await serve(tls_cert_file=broken).__aenter__()


async def test_a_port_in_use_is_named_in_the_error() -> None:
    async with serve() as server:
        port = urlsplit(server.url).port
        with pytest.raises(ConfigError, match=rf"http\.listen: cannot listen at 127\.0\.0\.1:{port}: "):
            await serve(listen=f"127.0.0.1:{port}").__aenter__()


async def test_the_rank_is_added_to_the_port() -> None:
    async with serve() as server:
        port = urlsplit(server.url).port
        assert port is not None
        shifted = status_server(FakeSource(), config(listen=f"127.0.0.1:{port - 3}"), rank=3)
        with pytest.raises(ConfigError, match=f":{port}: "):  # the port that is taken
            await shifted.__aenter__()
    with pytest.raises(ConfigError, match="the highest port is 65535"):
        await status_server(FakeSource(), config(listen="127.0.0.1:65535"), rank=1).__aenter__()


async def test_silent_and_endless_requests_are_ended() -> None:
    async with serve(timeout_s=0.3) as server:
        parts = urlsplit(server.url)
        for said in (
            b"",
            b"GET / HTTP/1.1\r\nX: ",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(said)
            async with asyncio.timeout(DEADLINE_S):
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
            writer.close()
        assert await _when_there_is_room(server) == 200


async def test_connections_above_the_limit_are_refused() -> None:
    async with serve(max_connections=2, timeout_s=60) as server:
        parts = urlsplit(server.url)
        held = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(2)]
        await until_open(server, 2)

        with pytest.raises((ConnectionResetError, ConnectionAbortedError, BrokenPipeError, IndexError)):
            await ask(server.url, "/healthz")
        for _, writer in held:
            writer.close()
        await until_open(server, 0)
        assert (await ask(server.url, "/healthz")).status == 200


async def test_connections_without_a_handshake_count_against_the_limit(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pem, tls = authority.issue("server"), ssl.create_default_context(cafile=authority.file)
    async with serve(tls_cert_file=pem, max_connections=4, timeout_s=600) as server:
        parts = urlsplit(server.url)
        silent = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(12)]
        ends = [asyncio.ensure_future(_end(reader)) for reader, _ in silent]
        async with asyncio.timeout(DEADLINE_S):
            while sum(end.done() for end in ends) < 8:
                await asyncio.wait([end for end in ends if not end.done()], return_when="FIRST_COMPLETED")

        with pytest.raises((OSError, IndexError)):
            await ask(server.url, "/healthz", tls=tls)
        held = [(end, writer) for end, (_, writer) in zip(ends, silent, strict=True) if not end.done()]
        assert len(held) == 4
        held[0][1].close()
        held[1][1].write(b"no handshake at all")
        await asyncio.wait([held[0][0], held[1][0]], timeout=DEADLINE_S)
        assert await _when_there_is_room(server, tls) == 200
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*ends)
    for _, writer in silent:
        writer.close()


async def _end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


async def _when_there_is_room(server: StatusServer, tls: ssl.SSLContext | None = None) -> int:
    """Wait until the server has noticed the end of a connection, and answers within its deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError, IndexError):
                return (await ask(server.url, "/healthz", tls=tls)).status
            await asyncio.sleep(0)


async def test_closing_the_server_ends_all_connections() -> None:
    async with serve(timeout_s=60) as server:
        parts = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        await until_open(server, 1)
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset
        await asyncio.open_connection(parts.hostname, parts.port)


async def test_a_server_whose_closing_is_cancelled_does_not_listen_any_more() -> None:
    server = serve()
    await server.__aenter__()
    address = urlsplit(server.url)
    closing = asyncio.ensure_future(server.__aexit__())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})

    assert closing.cancelled()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(address.hostname, address.port)


@pytest.mark.parametrize("turns_after", [1, 2, 3, 4])
async def test_a_server_whose_closing_is_cancelled_has_no_connection_any_more(turns_after: int) -> None:
    for number in range(8):  # iterations of the loop before the server is closed
        server = serve()
        await server.__aenter__()
        address = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        await turns(number)
        closing = asyncio.ensure_future(server.__aexit__())
        await turns(turns_after)
        closing.cancel()
        await asyncio.wait({closing})

        with contextlib.suppress(ConnectionResetError):
            assert await in_time(reader.read()) == b""
        writer.close()


async def test_an_error_of_the_source_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    async with serve(source) as server:
        source.broken = True
        heard = await ask(server.url, "/status.json")
        page = await ask(server.url, "/")
        source.broken = False

    assert (heard.status, page.status) == (500, 200)
    assert b"secret" not in heard.body
    assert any("a secret of the source" in record.getMessage() for record in caplog.records)


async def until_open(server: StatusServer, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while server.connections != number:
            await asyncio.sleep(0)
