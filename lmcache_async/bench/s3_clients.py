"""What the benchmark of the s3 tier compares it with: a bare obstore client, and HTTP over bare sockets."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmcache_async.bench.moved import TIMEOUT_S, Moved
from lmcache_async.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable


PREFIX = "bench"
_HEAD_BYTES = 1 << 14
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ObjectsMoved(Moved):
    """The same as objects under a prefix, read by parts."""

    endpoint: str
    part_bytes: int

    @property
    def bucket(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def names(self) -> list[str]:
        """Of the objects of a client that is not the tier."""
        return [f"bare/{key.hex()}" for key in self.keys]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Start and stop of what one request reads of a record."""
        nbytes = self.record.nbytes
        starts = range(0, nbytes, self.part_bytes)
        return [(start, min(start + self.part_bytes, nbytes)) for start in starts]


@dataclass(slots=True)
class Obstore:
    """The client that the tier has, by itself: whole puts, reads by the same parts, and nothing copied."""

    moved: ObjectsMoved
    _obstore: Any
    _store: Any
    _has_all: bool = False

    @classmethod
    def of(cls, moved: ObjectsMoved) -> Obstore:
        try:
            obstore = importlib.import_module("obstore")
            stores = importlib.import_module("obstore.store")
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "the benchmark s3 needs the package obstore: pip install 'lmcache-async[bench-s3]'"
            ) from error
        store = stores.S3Store(
            moved.bucket,
            config={
                "endpoint": moved.endpoint,
                "region": "us-east-1",
                "skip_signature": True,
                "unsigned_payload": True,
                "virtual_hosted_style_request": False,
            },
            client_options={"allow_http": True, "timeout": timedelta(seconds=TIMEOUT_S)},
        )
        return cls(moved, obstore, store)

    async def put(self) -> float:
        memory, start = self.moved.record.array, time.perf_counter()
        await self._all(
            self._obstore.put_async(self._store, name, memory, use_multipart=False)
            for name in self.moved.names
        )
        self._has_all = True
        return self.moved.rate(start)

    async def get(self) -> float:
        if not self._has_all:
            await self.put()
        moved, start = self.moved, time.perf_counter()
        got = await self._all(
            self._obstore.get_range_async(self._store, name, start=first, end=last)
            for name in moved.names
            for first, last in moved.parts
        )
        rate = moved.rate(start)
        if sum(map(len, got)) != moved.count * moved.record.nbytes:
            raise RuntimeError("obstore did not get all")
        return rate

    async def _all(self, calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        turns = asyncio.Semaphore(self.moved.connections)

        async def in_turn(call: Coroutine[Any, Any, Any]) -> Any:
            async with turns:
                return await call

        return await asyncio.gather(*map(in_turn, calls))


@dataclass(slots=True)
class BareHTTP:
    """A blocking socket in a thread for each request at a time, and nothing else: the least that can be done."""

    moved: ObjectsMoved
    _has_all: bool = False

    async def put(self) -> float:
        memory = self.moved.record.view
        rate = self._all(self._put, [(name, memory, "") for name in self.moved.names])
        self._has_all = True
        return rate

    async def get(self) -> float:
        if not self._has_all:
            await self.put()
        moved = self.moved
        buffers = [await moved.arena.lease(moved.record.nbytes, timeout_s=TIMEOUT_S) for _ in moved.names]
        work = [
            (name, buffer.view[first:last], f"Range: bytes={first}-{last - 1}\r\n")
            for name, buffer in zip(moved.names, buffers, strict=True)
            for first, last in moved.parts
        ]
        rate = self._all(self._get, work)
        work.clear()  # its views keep the slabs
        moved.check(buffers)
        return rate

    def _all(
        self,
        do: Callable[[socket.socket, str, memoryview, str], None],
        work: list[tuple[str, memoryview, str]],
    ) -> float:
        moved = self.moved
        left = iter(list(work))

        def thread(connection: socket.socket) -> None:
            for name, memory, more in left:  # the next one, whichever thread is free
                do(connection, f"/{moved.bucket}/{name}", memory, more)

        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(_connect(moved.endpoint)) for _ in range(moved.connections)]
            pool = stack.enter_context(ThreadPoolExecutor(moved.connections))
            start = time.perf_counter()
            list(pool.map(thread, sockets))
            return moved.rate(start)

    @staticmethod
    def _put(connection: socket.socket, path: str, memory: memoryview, more: str) -> None:
        head = f"PUT {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(memory)}\r\n{more}\r\n"
        connection.sendall(head.encode())
        connection.sendall(memory)
        _, length, rest = _answer(connection)
        while rest < length:
            rest += len(connection.recv(length - rest))

    @staticmethod
    def _get(connection: socket.socket, path: str, memory: memoryview, more: str) -> None:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n{more}\r\n".encode())
        content, length, got = _answer(connection)
        if length != len(memory):
            raise RuntimeError(f"{path} has {length} bytes, not {len(memory)}")
        memory[:got] = content
        while got < length:
            if not (more_bytes := connection.recv_into(memory[got:])):
                raise RuntimeError("the server has closed the connection")
            got += more_bytes


def _answer(connection: socket.socket) -> tuple[bytes, int, int]:
    """Of an answer the content that came with its head, the length of all of it, and how much came."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(_HEAD_BYTES)
        if not piece:
            raise RuntimeError("the server has closed the connection")
        data += piece
    head, content = data.split(b"\r\n\r\n", 1)
    length = _LENGTH.search(head)
    if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")) or length is None:
        raise RuntimeError(f"the server answered {head[:100]!r}")
    return content, int(length[1]), len(content)


def _connect(endpoint: str) -> socket.socket:
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or parts.hostname is None:
        raise ConfigError("--endpoint: expected http://host:port")
    connection = socket.create_connection((parts.hostname, parts.port or 80), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
