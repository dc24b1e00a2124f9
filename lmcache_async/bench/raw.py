"""Raw I/O of records, the limits of disks and tiers: files with direct I/O, and RESP over blocking sockets."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRWPair, FileIO
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from lmcache_async.bench.measure import rate
from lmcache_async.errors import TierError
from lmcache_async.memory.region import Region

ItemT = TypeVar("ItemT")
WorkerT = TypeVar("WorkerT")

SOCKET_TIMEOUT_S = 120.0
RESP_SCHEMES = ("valkey", "redis", "unix")


def move_all(
    move: Callable[[WorkerT, ItemT], None], workers: Sequence[WorkerT], items: Iterable[ItemT], nbytes: int
) -> float:
    """Move all items with one thread for each worker. Return GB/s of `nbytes` in total."""
    left = iter(list(items))
    starts: list[float] = []
    ready = threading.Barrier(len(workers), lambda: starts.append(time.perf_counter()), SOCKET_TIMEOUT_S)

    def thread(worker: WorkerT) -> None:
        ready.wait()  # the start of the threads is not part of the limit
        for item in left:
            move(worker, item)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(thread, workers))
        return rate(nbytes, starts[0])


class RawFiles(contextlib.ExitStack):
    """Files of one size, a multiple of the page size, and a buffer for each thread. Used as a context manager."""

    def __init__(self, path: Path, nbytes: int, count: int, threads: int) -> None:
        super().__init__()
        self._names = [path / f"{index}.record" for index in range(count)]
        # Huge pages, as in the arena: direct I/O with them is faster.
        region = Region(
            threads * nbytes, grain_bytes=nbytes, pin=False, pin_device=None, huge_pages=True, prefault=True
        )
        self.enter_context(contextlib.closing(region))
        self._memory = [region.view[at : at + nbytes] for at in range(0, threads * nbytes, nbytes)]
        for piece in self._memory:
            piece[:] = bytes(range(256)) * (nbytes // 256)
        self.direct = True  # O_DIRECT; a file system without it uses the page cache
        trial = path / "trial"
        try:
            with self._opened(trial, "wb") as file:
                file.write(self._memory[0][: mmap.PAGESIZE])
        except OSError:
            self.direct = False
        finally:
            trial.unlink(missing_ok=True)

    async def put(self) -> float:
        """Write all files again. Return GB/s."""
        for name in self._names:
            name.unlink(missing_ok=True)
        return self._all("xb", FileIO.write)

    async def get(self) -> float:
        """Read all files. Return GB/s."""
        if not all(name.exists() for name in self._names):
            await self.put()
        return self._all("rb", FileIO.readinto)

    def _all(self, mode: str, call: Callable[[FileIO, memoryview], int | None]) -> float:
        def move(memory: memoryview, name: Path) -> None:
            with self._opened(name, mode) as file:
                if call(file, memory) != len(memory):
                    raise OSError(f"{name}: short read or write")

        return move_all(move, self._memory, self._names, len(self._names) * len(self._memory[0]))

    def _opened(self, name: Path, mode: str) -> FileIO:
        flag = os.O_DIRECT if self.direct else 0
        return FileIO(name, mode, opener=lambda path, flags: os.open(path, flags | flag, 0o600))


class RespSockets:
    """A RESP client with a blocking socket and a thread per connection: the least work that moves records.

    The server must not require a password.
    """

    def __init__(self, url: str, connections: int, names: list[str], records: list[memoryview]) -> None:
        self._url = url
        self._connections = connections
        self._names = [name.encode() for name in names]
        self._records = records

    async def put(self) -> float:
        """Store all records. Return GB/s."""
        return self._all(self._put, self._records)

    async def get(self, buffers: list[memoryview]) -> float:
        """Read all records into the buffers. Return GB/s."""
        with self._connected() as server:
            there = _command(server, b"EXISTS", *self._names)
        if there != b":%d" % len(self._names):
            await self.put()
        return self._all(self._get, buffers)

    def clear(self) -> None:
        with self._connected() as server:
            _command(server, b"DEL", *self._names, expected=b":")

    def _all(
        self, move: Callable[[BufferedRWPair, tuple[bytes, memoryview]], None], memory: list[memoryview]
    ) -> float:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(self._connected()) for _ in range(self._connections)]
            return move_all(move, servers, zip(self._names, memory, strict=True), sum(map(len, memory)))

    @staticmethod
    def _put(server: BufferedRWPair, item: tuple[bytes, memoryview]) -> None:
        _command(server, b"SET", *item, expected=b"+OK")

    @staticmethod
    def _get(server: BufferedRWPair, item: tuple[bytes, memoryview]) -> None:
        name, memory = item
        _command(server, b"GET", name, expected=b"$%d\r\n" % len(memory))
        if server.readinto(memory) != len(memory) or server.read(2) != b"\r\n":
            raise TierError("the server closed the connection")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[BufferedRWPair]:
        parts = urlsplit(self._url)
        if parts.scheme == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(SOCKET_TIMEOUT_S)
            connection.connect(parts.path)
        else:
            connection = connect_tcp(parts.hostname or "127.0.0.1", parts.port or 6379)
        with connection, connection.makefile("rwb") as server:
            yield server


def connect_tcp(host: str, port: int) -> socket.socket:
    """Open a blocking connection without Nagle's algorithm."""
    connection = socket.create_connection((host, port), timeout=SOCKET_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _command(server: BufferedRWPair, *words: bytes | memoryview, expected: bytes = b"") -> bytes:
    """Send a command and return the first line of the answer, which must begin as expected."""
    server.write(b"*%d\r\n" % len(words))
    for word in words:
        server.write(b"$%d\r\n" % len(word))
        server.write(word)
        server.write(b"\r\n")
    server.flush()
    line = server.readline()
    if not line.endswith(b"\r\n"):
        raise TierError("the server closed the connection")
    if not line.startswith(expected):
        raise TierError(f"the server answered {line!r}")
    return line[:-2]
