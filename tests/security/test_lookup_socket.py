"""Access control of the lookup socket: its directory, its peers, and limits on requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_async.errors import ConfigError
from lmcache_async.integration.vllm import lookup_server
from lmcache_async.integration.vllm.lookup import RankConnection
from lmcache_async.integration.vllm.lookup_server import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Identity,
    LookupServer,
    TCPAddress,
    connect,
    encode,
    receive,
    socket_path,
)

IDENTITY = Identity(PROTOCOL, b"r" * 16, "xxh3_128", 8, 2)
NOBODY = 65534


class Engine:
    """An engine that has every key and answers only while the gate is open."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0

    async def lookup_keys(self, keys, *, lookup_id=None):
        del lookup_id
        self.asked += 1
        await self.gate.wait()
        return SimpleNamespace(count=len(keys), by_tier=Counter(cpu=len(keys)), pinned=len(keys), costs=())

    async def first_present(self, runs, *, lookup_id=None):
        return None

    def unpin(self, lookup_id):
        pass


async def clear(epoch, memory_only):
    return 0


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="lma") as name:  # the path of a socket is limited
        yield Path(name)


def server_at(path, engine=None):
    return LookupServer(engine or Engine(), IDENTITY, path, clear=clear)


async def until(condition):
    async with asyncio.timeout(150):
        while not condition():
            await asyncio.sleep(0)


async def greeted(path) -> Identity:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(encode({"id": 1, "op": "hello"}))
    answer = await receive(reader)
    writer.close()
    await writer.wait_closed()
    return Identity.of(answer)


async def test_the_socket_is_the_users_alone(directory):
    path = socket_path(directory, "engine", 0)
    server = server_at(path)
    await server.start()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert await greeted(path) == IDENTITY
    await server.aclose()
    assert list(path.parent.iterdir()) == []


CONNECT = """
import os, socket, sys
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(150)
    connection.connect(sys.argv[1])
    try:
        connection.sendall(bytes.fromhex(sys.argv[2]))
        print(len(connection.recv(1000)))
    except ConnectionError:
        print(0)
"""


async def test_another_user_is_refused_even_with_access_to_the_directory(directory, monkeypatch):
    if os.getuid():  # only root can change its user; otherwise pretend that the peer has another one
        monkeypatch.setattr(lookup_server.os, "geteuid", lambda: NOBODY)
    path = directory / "s"
    server = server_at(path)
    await server.start()
    directory.chmod(0o711)
    path.chmod(0o777)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CONNECT,
        str(path),
        encode({"id": 1, "op": "hello"}).hex(),
        stdout=subprocess.PIPE,
    )
    said, _ = await child.communicate()

    assert child.returncode == 0
    assert said == b"0\n"
    monkeypatch.undo()
    assert await greeted(path) == IDENTITY
    await server.aclose()


async def test_a_server_of_another_user_is_rejected(directory, monkeypatch):
    server = server_at(directory / "s")
    await server.start()
    changes = []
    link = RankConnection(0, directory / "s", lambda: changes.append(link.identity))
    own = os.geteuid()
    reader, writer = await asyncio.open_unix_connection(directory / "s")

    monkeypatch.setattr(lookup_server.os, "geteuid", lambda: own + 1)
    assert not await link.serve(reader, writer)
    monkeypatch.undo()

    assert changes == [None]
    await server.aclose()


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o703])
def test_a_configured_directory_writable_by_others_is_refused(directory, mode):
    base = directory / "shared"
    base.mkdir()
    base.chmod(mode)

    with pytest.raises(ConfigError, match=rf"vllm\.socket_dir: .*shared has mode {mode:04o}.*chmod"):
        socket_path(base, "engine", 0)


def test_a_directory_like_tmp_is_accepted(directory):
    directory.chmod(0o1777)

    assert socket_path(directory, "engine", 0).parent.stat().st_uid == os.getuid()


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: None], ids=["a file", "nothing"])
def test_a_configured_directory_that_is_none_is_refused(directory, make):
    make(directory / "base")

    with pytest.raises(ConfigError, match=r"vllm\.socket_dir: .*base"):
        socket_path(directory / "base", "engine", 0)


def test_names_from_outside_stay_in_the_directory(directory):
    for name in ("../../etc", "/etc/passwd", "..", "a/b", "\0", "", "x" * 4000, "ü🙂"):
        path = socket_path(directory, name, 0)
        assert path.parent == directory / f"lmcache-async-{os.getuid()}"
        assert path.name.endswith("-0.sock")


@pytest.mark.parametrize("kind", ["socket", "file", "dangling link", "link"])
async def test_leftovers_and_foreign_files_are_replaced(directory, kind):
    path, target = directory / "s", directory / "target"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    elif kind == "file":
        path.write_text("left")
    else:
        path.symlink_to(target)
        if kind == "link":
            target.write_text("precious")
    server = server_at(path)

    await server.start()

    assert await greeted(path) == IDENTITY
    await server.aclose()
    assert not target.exists() or target.read_text() == "precious"


async def test_a_directory_at_the_sockets_path_is_reported(directory):
    (directory / "s").mkdir()

    with pytest.raises(ConfigError, match=r"vllm\.socket_dir: cannot listen at"):
        await server_at(directory / "s").start()


async def test_a_place_that_another_engine_serves_is_not_taken_from_it(directory):
    first, second = server_at(directory / "s"), server_at(directory / "s")
    await first.start()

    with pytest.raises(
        ConfigError, match=rf"engine_id: process {os.getpid()} serves .* a separate engine_id"
    ):
        await second.start(wait_s=0)

    assert await greeted(directory / "s") == IDENTITY
    await first.aclose()
    await second.start(wait_s=0)
    assert await greeted(directory / "s") == IDENTITY
    await second.aclose()


async def test_a_place_whose_server_is_busy_is_not_taken_from_it(directory):
    with contextlib.ExitStack() as sockets:
        first = sockets.enter_context(socket.socket(socket.AF_UNIX))
        first.bind(str(directory / "s"))
        first.listen(0)
        with contextlib.suppress(BlockingIOError):  # the queue of connections to accept is full
            while True:
                waiting = sockets.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(directory / "s"))

        with pytest.raises(ConfigError, match=r"engine_id: another process serves"):
            await server_at(directory / "s").start(wait_s=0)


async def test_a_path_released_in_time_is_taken(directory):
    first, second = server_at(directory / "s"), server_at(directory / "s")
    await first.start()
    taking = asyncio.ensure_future(second.start(wait_s=150))
    await asyncio.sleep(0)
    await first.aclose()
    await taking

    assert await greeted(directory / "s") == IDENTITY
    await second.aclose()


class StubbornEngine(Engine):
    """An engine whose lookup ends when the gate opens, even if cancelled."""

    async def lookup_keys(self, keys, *, lookup_id=None):
        self.asked += 1
        while not self.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.gate.wait()


async def test_a_server_that_ends_late_leaves_the_next_ones_socket_alone(directory):
    engine = StubbornEngine()
    engine.gate.clear()
    first, second = server_at(directory / "s", engine), server_at(directory / "s")
    await first.start()
    _, writer = await asyncio.open_unix_connection(directory / "s")
    writer.write(encode({"id": 1, "op": "lookup", "lookup_id": "x", "keys": b"", "runs": []}))
    await until(lambda: engine.asked)
    closing = asyncio.ensure_future(first.aclose())
    await second.start(wait_s=150)
    engine.gate.set()
    await closing

    assert await greeted(directory / "s") == IDENTITY
    writer.close()
    await second.aclose()


async def test_connections_are_bounded_and_come_back(directory, monkeypatch):
    monkeypatch.setattr(lookup_server, "_MAX_CONNECTIONS", 2)
    server = server_at(directory / "s")
    await server.start()
    idle = [await asyncio.open_unix_connection(directory / "s") for _ in range(2)]
    await until(lambda: len(server._connections) == 2)

    reader, writer = await asyncio.open_unix_connection(directory / "s")
    assert await reader.read() == b""
    writer.close()
    for _, other in idle:
        other.close()
    await until(lambda: not server._connections)
    assert await greeted(directory / "s") == IDENTITY
    await server.aclose()


async def test_one_connection_has_so_many_requests_and_bytes_under_way(directory, monkeypatch):
    monkeypatch.setattr(lookup_server, "_MAX_REQUESTS", 5)
    monkeypatch.setattr(lookup_server, "_MAX_REQUEST_BYTES", 64)
    engine = Engine()
    engine.gate.clear()
    server = server_at(directory / "s", engine)
    await server.start()

    def lookup(number, keys):
        return encode({"id": number, "op": "lookup", "lookup_id": "x", "keys": bytes(16 * keys), "runs": []})

    reader, writer = await asyncio.open_unix_connection(directory / "s")
    writer.write(b"".join(lookup(number, 0) for number in range(20)))
    other_reader, other = await asyncio.open_unix_connection(directory / "s")
    other.write(b"".join(lookup(number, 3) for number in range(20)))
    await until(lambda: engine.asked == 5 + 2)
    for _ in range(100):
        await asyncio.sleep(0)

    assert engine.asked == 5 + 2
    engine.gate.set()
    assert sorted([(await receive(reader))["id"] for _ in range(20)]) == list(range(20))
    assert sorted([(await receive(other_reader))["id"] for _ in range(20)]) == list(range(20))
    writer.close()
    other.close()
    await server.aclose()


async def test_a_client_that_reads_no_answers_is_not_served_and_does_not_delay_the_end(
    directory, monkeypatch
):
    monkeypatch.setattr(lookup_server, "_MAX_REQUESTS", 4)
    monkeypatch.setattr(lookup_server, "CLOSE_S", 0.01)
    engine = Engine()
    server = server_at(directory / "s", engine)
    await server.start()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(directory / "s"))
        deaf.setblocking(False)
        nonsense = encode({"id": 1, "op": "x" * 4000})
        left, answered = memoryview(nonsense * 20_000), 0
        async with asyncio.timeout(150):
            while left:  # until the socket buffer is full
                try:
                    left = left[deaf.send(left) :]
                    answered = 0
                except BlockingIOError:
                    answered += 1
                    if answered > 2000:
                        break
                await asyncio.sleep(0)

        assert left
        assert await greeted(directory / "s") == IDENTITY
        async with asyncio.timeout(60):
            await server.aclose()


async def test_a_rank_that_reads_nothing_does_not_delay_the_end_of_its_client(monkeypatch):
    monkeypatch.setattr(lookup_server, "CLOSE_S", 0.01)
    ours, deaf = socket.socketpair()
    link = RankConnection(0, Path("/deaf"), lambda: None)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    serving = asyncio.ensure_future(link.serve(reader, writer))
    await until(lambda: link._writer is not None)
    while not writer.transport.get_write_buffer_size():
        link.post({"op": "lookup", "keys": bytes(1 << 20)})
        await asyncio.sleep(0)

    serving.cancel()
    await asyncio.wait({serving})

    assert serving.cancelled()
    deaf.close()


async def test_a_prompt_with_more_keys_than_a_message_holds_is_no_message():
    with pytest.raises(ValueError, match="exceeds"):
        encode({"op": "lookup", "keys": bytes(MAX_MESSAGE_BYTES)})


async def test_a_request_id_of_any_length_and_kind_is_encoded():
    assert b"\\udc80" in encode({"op": "unpin", "lookup_id": "\udc80#1"})


async def over_tcp(engine=None) -> tuple[LookupServer, TCPAddress]:
    server = LookupServer(engine or Engine(), IDENTITY, "127.0.0.1", clear=clear)
    await server.start()
    assert server.tcp_address is not None
    return server, server.tcp_address


async def test_over_tcp_only_clients_with_the_secret_are_answered():
    server, address = await over_tcp()
    reader, writer = await connect(address)
    writer.write(encode({"id": 1, "op": "hello"}))
    assert Identity.of(await receive(reader)) == IDENTITY
    writer.close()

    wrong = replace(address, secret=bytes(32))
    with pytest.raises(PermissionError, match=r"closed|does not know"):
        await connect(wrong)
    assert address.secret.hex() not in repr(address) + str(address)
    assert len(address.secret) == 32
    await server.aclose()


async def test_over_tcp_a_host_that_has_disappeared_is_detected():
    """Otherwise the connections that a server has lost would occupy all of its connections."""
    server, _ = await over_tcp()
    accepted: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        server.accept(reader, writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = replace(server.tcp_address, port=listener.sockets[0].getsockname()[1])
    _, writer = await connect(address)

    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    ends = [each.get_extra_info("socket") for each in (writer, *accepted)]
    alive = [end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in ends]
    values = [[end.getsockopt(socket.IPPROTO_TCP, option) for option in options] for end in ends]
    writer.close()
    listener.close()
    await server.aclose()

    assert all(alive)
    assert len(values) == 2
    for idle_s, interval_s, count, unacknowledged_ms in values:
        assert idle_s + interval_s * count <= 60
        assert 0 < unacknowledged_ms <= 60_000


async def test_a_client_rejects_a_server_without_the_secret():
    """Another server may have taken the port of one that has ended. The client's messages do not reveal the secret."""
    ended = asyncio.Event()

    async def pretend(reader, writer):
        nonce = await reader.readexactly(32)
        writer.write(nonce)  # the client's own nonce, so that both proofs are of equal nonces
        writer.write(await reader.readexactly(32))  # the client's own proof
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    listener = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with pytest.raises(PermissionError, match="does not know the secret"):
        await connect(TCPAddress("127.0.0.1", port, b"s" * 32))
    await ended.wait()
    listener.close()
    await listener.wait_closed()


async def test_nothing_is_answered_before_authentication():
    engine = Engine()
    server, address = await over_tcp(engine)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(encode({"id": 1, "op": "lookup", "lookup_id": "a", "keys": bytes(160), "runs": []}))

    said = b""
    with contextlib.suppress(ConnectionError):
        said = await reader.read()
    assert len(said) == 64  # its nonce and its proof
    assert not engine.asked
    writer.close()
    await server.aclose()


async def test_a_connection_that_proves_nothing_is_closed_at_the_deadline(monkeypatch):
    monkeypatch.setattr(lookup_server, "AUTHENTICATE_S", 0.01)
    server, address = await over_tcp()
    reader, writer = await asyncio.open_connection(address.host, address.port)

    assert len(await reader.read()) == 32  # its nonce
    writer.close()
    await server.aclose()


async def test_connections_that_prove_nothing_give_way_to_later_ones(monkeypatch):
    monkeypatch.setattr(lookup_server, "_MAX_CONNECTIONS", 3)
    server, address = await over_tcp()
    proven = [await connect(address)]
    silent = [await asyncio.open_connection(address.host, address.port) for _ in range(5)]
    for reader, _ in silent:
        await reader.readexactly(1)  # of the nonce: it was accepted

    proven += [await connect(address), await connect(address)]
    with pytest.raises(OSError):  # noqa: PT011 - refused, because three have proved the secret
        await connect(address)
    for reader, writer in proven:
        writer.write(encode({"id": 1, "op": "hello"}))
        assert Identity.of(await receive(reader)) == IDENTITY

    for _, writer in proven + silent:
        writer.close()
    await server.aclose()


async def test_an_address_that_is_not_of_this_host_is_named():
    server = LookupServer(Engine(), IDENTITY, "192.0.2.1", clear=clear)

    with pytest.raises(
        ConfigError, match=r"vllm\.lookup_transport: cannot listen at 192\.0\.2\.1.*VLLM_HOST_IP"
    ):
        await server.start()
