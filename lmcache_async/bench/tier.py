"""Put and get of records through one tier, compared with memcpy and a raw limit of its medium.

The tier is opened as configured, without layers. All records of a put or a get are one batch. Records are
sealed, have random keys and are verified after each get, so a tier that is in use can be measured. The
records are removed at the end.

Raw limits: for a URL of a Valkey or Redis server, blocking sockets with the same commands; for a tier with
the option `path`, files of the same size on the same file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from lmcache_async.bench.disk import RawFiles
from lmcache_async.bench.measure import MIB, UNIT, Case, rate
from lmcache_async.config import TierSpec, load_config
from lmcache_async.config.validation import Origin
from lmcache_async.engine.tiers import make_tier
from lmcache_async.errors import ConfigError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal, verify
from lmcache_async.registry import Registry
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from lmcache_async.bench.measure import Frame, Parameter, Probe, Row
    from lmcache_async.tiers.base import Tier

SUMMARY = "put and get through one tier, beside memcpy and raw I/O"
TIMEOUT_S = 120.0
NAME_PREFIX = "lmcache-async-bench:"
FORMAT = RecordFormat(namespace="bench", layout="bytes", dtype="uint8", chunk_size=16)
TOKENS = np.zeros(16, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options of the command, except `record_mib`.

    Attributes:
        tier: See `find_tier`.
        config: Config file of an engine.
        mib: MiB that each put and each get moves.
        connections: Sockets or files at the same time, of the raw limit.
        record_mib: Payload sizes of the records, measured one after the other.
    """

    tier: str
    config: Path | None = None
    mib: int = 256
    connections: int = 4
    record_mib: tuple[int, ...] = (4, 32)


def quick(tier: str, config: Path | None = None) -> Settings:
    """Settings with small sizes."""
    return Settings(tier, config, mib=2, connections=2, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    spec, third_party = find_tier(settings.tier, settings.config)
    for mib in settings.record_mib:
        with Records.made(mib, max(settings.mib // mib, 1)) as records:
            async with (
                open_tier(spec, records.arena, third_party=third_party) as tier,
                contextlib.AsyncExitStack() as stack,
            ):
                stack.push_async_callback(remove_all, records, tier)
                memcpy = {"memcpy, 1 thread": records.copy_probe(1)}
                puts, gets = stack.enter_context(_raw_limit(spec, records, settings.connections, frame))
                parameters: dict[str, Parameter] = {"tier": spec.name, "connections": settings.connections}
                for row in await frame.compare(
                    cases(records, tier, memcpy | puts, memcpy | gets, parameters)
                ):
                    yield row
                if not tier.capabilities.removes:
                    frame.leave_out("removal of the records", f"the tier {spec.name} cannot remove")


def find_tier(name: str, config: Path | None) -> tuple[TierSpec, bool]:
    """Resolve the argument TIER.

    Args:
        name: With a config, the id of one of its tiers. Otherwise a tier as JSON, a URL whose scheme is the
            name of a tier, or the name of a tier.
        config: A config file of an engine.

    Returns:
        The tier, and whether third-party plug-ins may be loaded.

    Raises:
        ConfigError: There is no such tier.
    """
    if config is not None:
        loaded = load_config(config)
        for tier in loaded.tiers:
            if tier.id == name:
                return tier, loaded.plugins.third_party
        ids = ", ".join(tier.id for tier in loaded.tiers)
        raise ConfigError(f"{config} has no tier {name!r}; its tiers are {ids}")
    try:
        if name.lstrip().startswith("{"):
            fields = json.loads(name)
        else:
            fields = {"name": name.partition("://")[0]} | ({"url": name} if "://" in name else {})
        return TierSpec.model_validate(fields).placed(Origin("TIER")), True
    except ValueError as error:
        raise ConfigError(f"TIER: expected a tier as JSON, a URL or a name: {error}") from None


@contextlib.asynccontextmanager
async def open_tier(spec: TierSpec, arena: Arena, *, third_party: bool = True) -> AsyncIterator[Tier]:
    """Open a tier without layers.

    Raises:
        ConfigError: The tier or an option is wrong, or the tier is memory of the process.
    """
    tier = make_tier(spec, Registry(), third_party=third_party)
    if tier.capabilities.in_arena:
        raise ConfigError(
            f"the tier {spec.name} is the arena of the engine: measure it with lmcache-async bench memory"
        )
    tier.bind(arena)
    async with tier:
        yield tier


@dataclass(slots=True, eq=False)
class Records:
    """Sealed records that probes move, in an arena with room for as many reads.

    Attributes:
        keys: Keys that the records are sealed with; new ones for each put through the tier.
        names: Names for the clients of raw limits.
    """

    mib: int
    arena: Arena
    buffers: list[Buffer]
    stack: contextlib.ExitStack
    keys: list[ChunkKey] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def made(cls, mib: int, count: int) -> Iterator[Records]:
        """`count` records with payloads of `mib` MiB."""
        nbytes = FORMAT.record_bytes(mib * MIB)
        arena = Arena(2 * count * nbytes, nbytes, huge_pages=True, prefault=True)
        with contextlib.closing(arena), contextlib.ExitStack() as stack:
            buffers = []
            for number in range(count):
                buffer = arena.lease_nowait(nbytes)
                if buffer is None:
                    raise RuntimeError("the arena has no room for the records")
                stack.callback(buffer.release)
                buffer.array[FORMAT.header_bytes :] = number % 251
                buffers.append(buffer)
            run = os.urandom(8).hex()
            names = [f"{NAME_PREFIX}{run}:{number}" for number in range(count)]
            records = cls(mib, arena, buffers, stack, names=names)
            records.seal()
            yield records

    @property
    def count(self) -> int:
        return len(self.buffers)

    @property
    def record_bytes(self) -> int:
        return self.buffers[0].nbytes

    @property
    def items(self) -> list[tuple[ChunkKey, Buffer]]:
        return list(zip(self.keys, self.buffers, strict=True))

    def seal(self) -> None:
        """Seal all records with new random keys."""
        self.keys = [seal_record(buffer, ChunkKey(os.urandom(KEY_BYTES))) for buffer in self.buffers]

    def rate(self, start: float) -> float:
        """GB/s since `start`, of all records."""
        return rate(self.count * self.record_bytes, start)

    async def lease(self) -> list[Buffer]:
        """Buffers to read all records into."""
        return [await self.arena.lease(self.record_bytes, timeout_s=TIMEOUT_S) for _ in self.buffers]

    def check(self, buffers: Sequence[Buffer]) -> None:
        """Compare the end of each payload, and release the buffers.

        Raises:
            RuntimeError: A record is missing or has other content.
        """
        right = sum(
            bytes(buffer.view[-64:]) == bytes(record.view[-64:])
            for buffer, record in zip(buffers, self.buffers, strict=True)
        )
        for buffer in buffers:
            buffer.release()
        if right != self.count:
            raise RuntimeError(f"{right} of {self.count} records were read back")

    def prove(self, buffers: Sequence[Buffer]) -> None:
        """Verify each record as an engine does, and release the buffers.

        Raises:
            ChunkCorruptError: A record is not the one that was put.
        """
        try:
            for key, buffer in zip(self.keys, buffers, strict=True):
                verify(buffer.view, format=FORMAT, chunk=Chunk(key, 0, TOKENS), request_namespace="")
        finally:
            for buffer in buffers:
                buffer.release()

    def copy_probe(self, threads: int) -> Probe:
        """GB/s of memcpy of all records to private memory."""
        copy = self.copier(threads)

        async def probe() -> float:
            start = time.perf_counter()
            await copy(self.buffers)
            return self.rate(start)

        return probe

    def copier(self, threads: int) -> Callable[[Sequence[Buffer]], Awaitable[None]]:
        """A coroutine function that copies buffers to private memory on `threads` threads."""
        target = np.ones(self.count * self.record_bytes, dtype=np.uint8)  # written, so that its pages exist
        pool = self.stack.enter_context(ThreadPoolExecutor(threads))

        def part(sources: Sequence[Buffer], first: int) -> None:
            for index in range(first, len(sources), threads):
                at = index * self.record_bytes
                np.copyto(target[at : at + self.record_bytes], sources[index].array)

        async def copy(sources: Sequence[Buffer]) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.gather(
                *(loop.run_in_executor(pool, part, sources, first) for first in range(threads))
            )

        return copy


def seal_record(buffer: Buffer, key: ChunkKey) -> ChunkKey:
    """Seal the payload in `buffer` under `key`, and return the key."""
    payload = buffer.nbytes - FORMAT.header_bytes
    chunk = Chunk(key, 0, TOKENS)
    seal(
        buffer.view, format=FORMAT, chunk=chunk, request_namespace="", shape=(payload,), payload_bytes=payload
    )
    return key


def cases(
    records: Records,
    tier: Tier,
    puts: Mapping[str, Probe],
    gets: Mapping[str, Probe],
    parameters: Mapping[str, Parameter],
    *,
    threads: int = 1,
) -> list[Case]:
    """Put and get of all records through `tier`, with limits of each.

    A get from a tier with memory of its own copies nothing. There the figure includes reading the records
    once into private memory.

    Args:
        threads: Threads of that reading.
    """
    own_memory = tier.capabilities.own_memory
    facts: dict[str, Parameter] = {"record_bytes": records.record_bytes, "records": records.count}
    name, facts = f"records of {records.mib} MiB", facts | dict(parameters)
    read = records.copier(threads) if own_memory else None

    async def put() -> float:
        await remove_all(records, tier)
        records.seal()
        start = time.perf_counter()
        answers = await tier.put_many(records.items)
        rate = records.rate(start)
        for answer in answers:
            if answer is not None:
                raise answer
        return rate

    async def get() -> float:
        await ensure_put(records, tier)
        start = time.perf_counter()
        buffers = await get_all(records, tier)
        if read is not None:
            await read(buffers)
        rate = records.rate(start)
        records.prove(buffers)
        return rate

    verb = "get and read" if own_memory else "get"
    return [Case(f"put, {name}", UNIT, put, puts, facts), Case(f"{verb}, {name}", UNIT, get, gets, facts)]


async def ensure_put(records: Records, tier: Tier) -> None:
    """Put the records if the tier does not have all of them."""
    if await tier.count_prefix(records.keys) < records.count:
        for answer in await tier.put_many(records.items):
            if answer is not None:
                raise answer


async def get_all(records: Records, tier: Tier) -> list[Buffer]:
    """Get all records in one batch.

    Raises:
        TierError: A read failed.
        RuntimeError: A record is missing.
    """

    async def allocate(nbytes: int) -> Buffer:
        return await records.arena.lease(nbytes, timeout_s=TIMEOUT_S)

    got = await tier.get_many(records.keys, allocate)
    buffers = [one for one in got if isinstance(one, Buffer)]
    if len(buffers) == records.count:
        return buffers
    for buffer in buffers:
        buffer.release()
    for one in got:
        if isinstance(one, Exception):
            raise one
    raise RuntimeError(f"{len(buffers)} of {records.count} records were read back")


async def remove_all(records: Records, tier: Tier) -> None:
    for key in records.keys:
        await tier.remove(key)


@contextlib.contextmanager
def _raw_limit(
    spec: TierSpec, records: Records, connections: int, frame: Frame
) -> Iterator[tuple[dict[str, Probe], dict[str, Probe]]]:
    """Open the raw limit of the tier's medium; yield its put and its get by name, nothing if there is none."""
    url, path = spec.options.get("url"), spec.options.get("path")
    name = ""
    raw: RawFiles | RespSockets | None = None
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(path, str):
                name = "raw files"
                parent = Path(path).expanduser().absolute().parent
                directory = tempfile.TemporaryDirectory(dir=parent, prefix="lmcache-async-bench")
                nbytes = -(-records.record_bytes // 4096) * 4096
                raw = stack.enter_context(
                    RawFiles.open(Path(stack.enter_context(directory)), nbytes, records.count, connections)
                )
            elif isinstance(url, str) and urlsplit(url).scheme in RespSockets.SCHEMES and "@" not in url:
                name = "bare sockets"
                raw = sockets = RespSockets(url, records, connections)
                sockets.clear()
                stack.callback(sockets.clear)
        except (OSError, RuntimeError) as error:
            frame.leave_out(name, str(error))
            raw = None
        yield ({}, {}) if raw is None else ({name: raw.put}, {name: raw.get})


class RespSockets:
    """RESP over a blocking socket in a thread per connection: the minimum of work to move the records."""

    SCHEMES = ("valkey", "redis", "unix")

    def __init__(self, url: str, records: Records, connections: int) -> None:
        self._url = url
        self._records = records
        self._connections = connections

    async def put(self) -> float:
        return self._all(self._put, self._records.buffers)

    async def get(self) -> float:
        if not self._has_all():
            await self.put()
        buffers = await self._records.lease()
        rate = self._all(self._get, buffers)
        self._records.check(buffers)
        return rate

    def clear(self) -> None:
        """Remove the records of these sockets.

        Raises:
            RuntimeError: The server requires a password, or is not a RESP server.
        """
        with self._connect() as connection:
            answer = self._command(connection, b"DEL")
        if not answer.startswith(b":"):
            raise RuntimeError(f"the server answered {answer!r}")

    def _has_all(self) -> bool:
        with self._connect() as connection:
            return self._command(connection, b"EXISTS") == b":%d" % self._records.count

    def _command(self, connection: socket.socket, verb: bytes) -> bytes:
        words = [verb, *(name.encode() for name in self._records.names)]
        connection.sendall(b"*%d\r\n" % len(words) + b"".join(map(_bulk, words)))
        return _line(connection)

    def _all(self, work: Callable[[socket.socket, bytes, memoryview], None], buffers: list[Buffer]) -> float:
        records = self._records
        left = iter(list(zip(records.names, (buffer.view for buffer in buffers), strict=True)))

        def thread(connection: socket.socket) -> None:
            for name, memory in left:
                work(connection, name.encode(), memory)

        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(self._connect()) for _ in range(self._connections)]
            pool = stack.enter_context(ThreadPoolExecutor(self._connections))
            start = time.perf_counter()
            list(pool.map(thread, sockets))
            return records.rate(start)

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
        receive_into(connection, memory)
        connection.recv(2, socket.MSG_WAITALL)

    def _connect(self) -> socket.socket:
        parts = urlsplit(self._url)
        if parts.scheme == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(parts.path)
            return connection
        return connect_tcp(parts.hostname or "127.0.0.1", parts.port or 6379)


def connect_tcp(host: str, port: int) -> socket.socket:
    """A blocking connection without Nagle's algorithm."""
    connection = socket.create_connection((host, port), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    """Fill `memory`.

    Raises:
        RuntimeError: The connection ended before.
    """
    got = 0
    while got < len(memory):
        if not (count := connection.recv_into(memory[got:])):
            raise RuntimeError("the server closed the connection")
        got += count


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        if not (byte := connection.recv(1)):
            raise RuntimeError("the server closed the connection")
        line += byte
    return line[:-2]
