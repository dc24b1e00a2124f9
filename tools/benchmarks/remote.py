"""Put and get through the tiers valkey, s3, mooncake and host, compared with other clients and sockets.

Both sides move the same number of records concurrently between one server and the same memory. Without
`--url`, the server runs on the loopback; see `servers.py`. `lmcache-async bench tier` measures any configured
tier, with fewer limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from lmcache_async.bench.measure import Case, Frame, Parameter, Probe, Row
from lmcache_async.bench.raw import RespSockets, connect_tcp
from lmcache_async.bench.tier import (
    NAME_PREFIX,
    TIMEOUT_S,
    Records,
    cases,
    ensure_put,
    get_all,
    open_tier,
    remove_all,
)
from lmcache_async.config import TierSpec
from lmcache_async.errors import ConfigError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Tier
from tools.benchmarks import servers
from tools.benchmarks.command import option

MIB = 1 << 20
Limits = tuple[dict[str, "Probe"], dict[str, "Probe"]]
"""Limits of a put and of a get, by name."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    url: str = option("", "server to use; by default one on the loopback", parse=str)
    mib: int = option(256, "MiB of each put and each get")
    parallel: int = option(4, "concurrent connections, requests or threads")
    part_mib: int = option(8, "MiB of a part in which s3 reads longer records")
    record_mib: tuple[int, ...] = field(default=(4, 32))


class Remote(ABC):
    """One tier: its server, its options and its limits.

    Attributes:
        name: Name of the tier.
    """

    name: ClassVar[str]

    def __init__(self, usual: Settings, small: Settings) -> None:
        self.usual = usual
        self.small = small

    @abstractmethod
    def server(self, settings: Settings) -> AbstractContextManager[Any]:
        """Start a server on the loopback, and yield its URL or socket."""

    @abstractmethod
    def options(self, url: Any, settings: Settings) -> dict[str, Any]:
        """Return the options of the tier."""

    @abstractmethod
    def limits(self, url: Any, records: Records, settings: Settings) -> AbstractAsyncContextManager[Limits]:
        """Open the limits of this medium."""

    def more_cases(self, records: Records, tier: Tier, parameters: dict[str, Parameter]) -> list[Case]:
        """Return cases other than put and get."""
        del records, tier, parameters
        return []

    def missing(self) -> str:
        """Return the reason why it cannot be measured here; "" if it can."""
        return ""

    async def run(self, settings: Settings, frame: Frame) -> AsyncIterator[Row]:
        if why := self.missing():
            frame.leave_out(self.name, why)
            return
        with contextlib.nullcontext(settings.url) if settings.url else self.server(settings) as url:
            for mib in settings.record_mib:
                with Records(mib, max(settings.mib // mib, 1)) as records:
                    spec = TierSpec(name=self.name, options=self.options(url, settings))
                    async with (
                        open_tier(spec, records.arena) as tier,
                        self.limits(url, records, settings) as limits,
                    ):
                        parameters: dict[str, Parameter] = {"parallel": settings.parallel}
                        chosen = cases(records, tier, *limits, parameters, threads=settings.parallel)
                        chosen += self.more_cases(records, tier, parameters)
                        try:
                            for row in await frame.compare(chosen):
                                yield row
                        finally:
                            await remove_all(records, tier)


class Valkey(Remote):
    name = "valkey"

    def server(self, settings: Settings) -> AbstractContextManager[str]:
        del settings
        return servers.valkey_server()

    def options(self, url: str, settings: Settings) -> dict[str, Any]:
        return {
            "url": url,
            "key_prefix": NAME_PREFIX,
            "connections": settings.parallel,
            "transfer_timeout_s": TIMEOUT_S,
            "lookup_timeout_s": TIMEOUT_S,
        }

    @contextlib.asynccontextmanager
    async def limits(self, url: str, records: Records, settings: Settings) -> AsyncIterator[Limits]:
        views = [buffer.view for buffer in records.buffers]
        bare = RespSockets(url, settings.parallel, records.names, views)
        redis = RedisPy.of(url, records, settings.parallel)
        try:
            yield (
                {"bare sockets": bare.put, "redis-py": redis.put},
                {
                    "bare sockets": records.read_probe(bare.get),
                    "redis-py": redis.get,
                },
            )
        finally:
            await redis.close()
            bare.clear()


@dataclass(frozen=True, slots=True)
class RedisPy:
    """The asyncio client of redis-py, one per connection."""

    records: Records
    clients: list[Any]

    @classmethod
    def of(cls, url: str, records: Records, connections: int) -> RedisPy:
        redis = importlib.import_module("redis.asyncio")
        url = url.replace("valkey", "redis", 1) if url.startswith("valkey") else url
        return cls(records, [redis.Redis.from_url(url) for _ in range(connections)])

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()

    async def put(self) -> float:
        content = {
            name: buffer.view for name, buffer in zip(self.records.names, self.records.buffers, strict=True)
        }
        return await self._all(lambda client, name: client.set(name, content[name]))

    async def get(self) -> float:
        if not all([await self.clients[0].exists(name) for name in self.records.names]):
            await self.put()
        return await self._all(lambda client, name: client.get(name))

    async def _all(self, work: Callable[[Any, str], Any]) -> float:
        for client in self.clients:
            await client.ping()  # opens the connection
        left = iter(self.records.names)

        async def task(client: Any) -> None:
            for name in left:
                if not await work(client, name):
                    raise RuntimeError(f"redis-py lost {name}")

        start = time.perf_counter()
        await asyncio.gather(*map(task, self.clients))
        return self.records.rate(start)


class S3(Remote):
    name = "s3"

    def server(self, settings: Settings) -> AbstractContextManager[str]:
        del settings
        return servers.s3_server()

    def options(self, url: str, settings: Settings) -> dict[str, Any]:
        bucket = Bucket.of(url)
        return {
            "url": f"s3://{bucket.name}/bench",
            "endpoint": bucket.endpoint,
            "region": "us-east-1",
            "allow_http": True,
            "anonymous": True,
            "concurrency": settings.parallel,
            "part_bytes": settings.part_mib * MIB,
            "request_timeout_s": TIMEOUT_S,
        }

    @contextlib.asynccontextmanager
    async def limits(self, url: str, records: Records, settings: Settings) -> AsyncIterator[Limits]:
        objects = Objects(records, Bucket.of(url), settings.parallel, settings.part_mib * MIB)
        bare, client = BareHTTP(objects), Obstore.of(objects)
        yield {"bare HTTP": bare.put, "obstore": client.put}, {"bare HTTP": bare.get, "obstore": client.get}
        await client.clear()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a server that accepts unsigned requests."""

    endpoint: str
    host: str
    port: int
    name: str

    @classmethod
    def of(cls, url: str) -> Bucket:
        parts = urlsplit(url)
        name = parts.path.strip("/")
        if parts.scheme != "http" or parts.hostname is None or not name:
            raise ConfigError(f"--url {url}: expected http://host:port/bucket")
        return cls(f"http://{parts.netloc}", parts.hostname, parts.port or 80, name)


@dataclass(frozen=True, slots=True)
class Objects:
    """The records as objects that are read in parts."""

    records: Records
    bucket: Bucket
    parallel: int
    part_bytes: int

    @property
    def names(self) -> list[str]:
        return [f"bare/{name.replace(':', '/')}" for name in self.records.names]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Start and stop of each read of a record."""
        nbytes = self.records.record_bytes
        return [(at, min(at + self.part_bytes, nbytes)) for at in range(0, nbytes, self.part_bytes)]


@dataclass(slots=True)
class Obstore:
    """The tier's client alone: whole puts, reads of the same parts, no copy into the arena."""

    objects: Objects
    _obstore: Any
    _store: Any
    _has_all: bool = False

    @classmethod
    def of(cls, objects: Objects) -> Obstore:
        obstore = importlib.import_module("obstore")
        store = importlib.import_module("obstore.store").S3Store(
            objects.bucket.name,
            config={
                "endpoint": objects.bucket.endpoint,
                "region": "us-east-1",
                "skip_signature": True,
                "unsigned_payload": True,
                "virtual_hosted_style_request": False,
            },
            client_options={"allow_http": True, "timeout": timedelta(seconds=TIMEOUT_S)},
        )
        return cls(objects, obstore, store)

    async def clear(self) -> None:
        await self._obstore.delete_async(self._store, self.objects.names)

    async def put(self) -> float:
        records, start = self.objects.records, time.perf_counter()
        await self._all(
            self._obstore.put_async(self._store, name, buffer.array, use_multipart=False)
            for name, buffer in zip(self.objects.names, records.buffers, strict=True)
        )
        self._has_all = True
        return records.rate(start)

    async def get(self) -> float:
        if not self._has_all:
            await self.put()
        records, start = self.objects.records, time.perf_counter()
        got = await self._all(
            self._obstore.get_range_async(self._store, name, start=first, end=last)
            for name in self.objects.names
            for first, last in self.objects.parts
        )
        rate = records.rate(start)
        if sum(map(len, got)) != records.count * records.record_bytes:
            raise RuntimeError("obstore did not read all records")
        return rate

    async def _all(self, calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        limit = asyncio.Semaphore(self.objects.parallel)

        async def limited(call: Coroutine[Any, Any, Any]) -> Any:
            async with limit:
                return await call

        return await asyncio.gather(*map(limited, calls))


@dataclass(slots=True)
class BareHTTP:
    """HTTP over a blocking socket in a thread per request: the minimum of work to move the objects."""

    _HEAD_BYTES: ClassVar[int] = 1 << 14
    _LENGTH: ClassVar[re.Pattern[bytes]] = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

    objects: Objects
    _has_all: bool = False

    async def put(self) -> float:
        objects = self.objects
        work = [
            (name, buffer.view, "")
            for name, buffer in zip(objects.names, objects.records.buffers, strict=True)
        ]
        rate = self._all(self._put, work)
        self._has_all = True
        return rate

    async def get(self) -> float:
        if not self._has_all:
            await self.put()
        buffers = await self.objects.records.lease()
        work = [
            (name, buffer.view[first:last], f"Range: bytes={first}-{last - 1}\r\n")
            for name, buffer in zip(self.objects.names, buffers, strict=True)
            for first, last in self.objects.parts
        ]
        rate = self._all(self._get, work)
        work.clear()  # its views keep the slabs leased
        self.objects.records.check(buffers)
        return rate

    def _all(
        self,
        do: Callable[[socket.socket, str, memoryview, str], None],
        work: list[tuple[str, memoryview, str]],
    ) -> float:
        bucket, parallel = self.objects.bucket, self.objects.parallel
        left = iter(list(work))

        def thread(connection: socket.socket) -> None:
            for name, memory, more in left:
                do(connection, f"/{bucket.name}/{name}", memory, more)

        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(connect_tcp(bucket.host, bucket.port)) for _ in range(parallel)]
            pool = stack.enter_context(ThreadPoolExecutor(parallel))
            start = time.perf_counter()
            list(pool.map(thread, sockets))
            return self.objects.records.rate(start)

    def _put(self, connection: socket.socket, path: str, memory: memoryview, more: str) -> None:
        head = f"PUT {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(memory)}\r\n{more}\r\n"
        connection.sendall(head.encode())
        connection.sendall(memory)
        content, length = self._answer(connection)
        _receive_into(connection, memoryview(bytearray(length - len(content))))

    def _get(self, connection: socket.socket, path: str, memory: memoryview, more: str) -> None:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\n{more}\r\n".encode())
        content, length = self._answer(connection)
        if length != len(memory):
            raise RuntimeError(f"{path} has {length} bytes, expected {len(memory)}")
        memory[: len(content)] = content
        _receive_into(connection, memory[len(content) :])

    def _answer(self, connection: socket.socket) -> tuple[bytes, int]:
        """Return the part of the content that came with the response headers, and the content length."""
        data = b""
        while b"\r\n\r\n" not in data:
            if not (piece := connection.recv(self._HEAD_BYTES)):
                raise RuntimeError("the server closed the connection")
            data += piece
        head, content = data.split(b"\r\n\r\n", 1)
        length = self._LENGTH.search(head)
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")) or length is None:
            raise RuntimeError(f"the server answered {head[:100]!r}")
        return content, int(length[1])


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    got = 0
    while got < len(memory):
        if not (count := connection.recv_into(memory[got:])):
            raise RuntimeError("the server closed the connection")
        got += count


class Mooncake(Remote):
    name = "mooncake"
    BATCH_BYTES = 64 * MIB

    def missing(self) -> str:
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:  # a system library is missing; see docs/tiers/mooncake.md
            return f"Mooncake's library cannot be loaded: {error}"
        return ""

    def server(self, settings: Settings) -> AbstractContextManager[str]:
        # For the records of the tier, of the client, and of the previous round, which are removed late.
        return servers.mooncake_pool((settings.mib + 64) * 4 * MIB)

    def options(self, url: str, settings: Settings) -> dict[str, Any]:
        return {
            "url": url,
            "hostname": "127.0.0.1",
            "prefix": f"{NAME_PREFIX}tier:",
            "threads": settings.parallel,
            "batch_bytes": self.BATCH_BYTES,
        }

    @contextlib.asynccontextmanager
    async def limits(self, url: str, records: Records, settings: Settings) -> AsyncIterator[Limits]:
        with MooncakeClient.open(url, records, settings.parallel, self.BATCH_BYTES) as client:
            yield (
                {"Mooncake's client": client.put, "Mooncake's client, one call": client.put_at_once},
                {"Mooncake's client": client.get, "Mooncake's client, one call": client.get_at_once},
            )
            client.clear()


@dataclass(frozen=True, slots=True)
class MooncakeClient:
    """Mooncake's client: its batch calls without copies, with as many threads as the tier."""

    records: Records
    store: Any
    threads: int
    batch_records: int

    @classmethod
    @contextlib.contextmanager
    def open(cls, url: str, records: Records, threads: int, batch_bytes: int) -> Iterator[MooncakeClient]:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        _check(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", url.rpartition("/")[2]))
        try:
            _check(store.register_buffer(records.arena.address, len(records.arena.region)))
            yield cls(records, store, threads, max(1, batch_bytes // records.record_bytes))
            store.unregister_buffer(records.arena.address)
        finally:
            store.close()

    async def put(self) -> float:
        self.clear()
        return self._all(self._put, self.records.buffers, self.batch_records)

    async def put_at_once(self) -> float:
        self.clear()
        return self._all(self._put, self.records.buffers, self.records.count)

    async def get(self) -> float:
        return await self._get_all(self.batch_records)

    async def get_at_once(self) -> float:
        return await self._get_all(self.records.count)

    def clear(self) -> None:
        for name in self.records.names:
            self.store.remove(name, force=True)

    async def _get_all(self, batch_records: int) -> float:
        records = self.records
        if self.store.batch_is_exist(records.names) != [1] * records.count:
            await self.put()
        buffers = await records.lease()
        rate = self._all(self._get, buffers, batch_records)
        records.check(buffers)
        return rate

    def _all(
        self, work: Callable[[list[str], Sequence[Buffer]], None], buffers: list[Buffer], batch: int
    ) -> float:
        names = self.records.names
        batches = iter(
            [(names[at : at + batch], buffers[at : at + batch]) for at in range(0, len(names), batch)]
        )

        def thread(_: int) -> None:
            for some, memory in batches:
                work(some, memory)

        with ThreadPoolExecutor(self.threads) as pool:
            start = time.perf_counter()
            list(pool.map(thread, range(self.threads)))
            return self.records.rate(start)

    def _put(self, names: list[str], buffers: Sequence[Buffer]) -> None:
        codes = self.store.batch_put_from(names, [b.address for b in buffers], [b.nbytes for b in buffers])
        _check(next((code for code in codes if code), 0))

    def _get(self, names: list[str], buffers: Sequence[Buffer]) -> None:
        codes = self.store.batch_get_into(names, [b.address for b in buffers], [b.nbytes for b in buffers])
        _check(next((code for code in codes if code < 0), 0))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"Mooncake's client returned code {code}")


class Host(Remote):
    """The host tier. A get copies nothing, so it is measured with one read of the records."""

    name = "host"

    def server(self, settings: Settings) -> AbstractContextManager[Any]:
        largest = max(settings.record_mib)
        return servers.host_daemon((settings.mib + 2 * largest + 16) * MIB)

    def options(self, url: Any, settings: Settings) -> dict[str, Any]:
        waits = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), TIMEOUT_S)
        return {"socket": url, "copy_threads": settings.parallel, **waits}

    @contextlib.asynccontextmanager
    async def limits(self, url: Any, records: Records, settings: Settings) -> AsyncIterator[Limits]:
        del url
        copies = {
            f"memcpy, {threads} thread{'s' * (threads > 1)}": records.copy_probe(threads)
            for threads in sorted({1, settings.parallel})
        }
        yield copies, copies

    def more_cases(self, records: Records, tier: Tier, parameters: dict[str, Parameter]) -> list[Case]:
        async def lease() -> float:
            await ensure_put(records, tier)
            start = time.perf_counter()
            for buffer in await get_all(records, tier):
                buffer.release()
            return (time.perf_counter() - start) * 1e6

        async def hop() -> float:
            start = time.perf_counter()
            await asyncio.to_thread(int)
            return (time.perf_counter() - start) * 1e6

        facts = {"record_bytes": records.record_bytes, "records": records.count} | parameters
        name = f"lease and release, records of {records.mib} MiB"
        return [Case(name, "us", lease, {"thread hop": hop}, facts)]


_SMALL = Settings(mib=2, parallel=2, part_mib=1, record_mib=(1,))

REMOTES: dict[str, Remote] = {
    one.name: one
    for one in (
        Valkey(Settings(), _SMALL),
        S3(Settings(mib=128, parallel=8), replace(_SMALL, record_mib=(1, 2))),
        Mooncake(Settings(parallel=1), replace(_SMALL, parallel=1)),
        Host(Settings(parallel=2), _SMALL),
    )
}
