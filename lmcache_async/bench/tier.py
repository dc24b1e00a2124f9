"""Put and get of records through one tier, compared with memcpy and a raw limit of its medium.

The tier is opened as configured, without layers. All records of a put or a get are one batch. Records are
sealed, have random keys and are verified after each get, so a tier that is in use can be measured. The
records are removed at the end, if the tier can remove records.

Raw limits: for a URL of a Valkey or Redis server, blocking sockets with the same commands; for a tier with
the option `path`, files of the same size on the same file system.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from lmcache_async.bench.measure import MIB, UNIT, Case, Frame, Parameter, Probe, Row, check_memory, rate
from lmcache_async.bench.raw import RESP_SCHEMES, RawFiles, RespSockets, move_all
from lmcache_async.config import TierSpec
from lmcache_async.engine.tiers import make_tier
from lmcache_async.errors import ConfigError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer, pages
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.registry import Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey

SUMMARY = "put and get through one tier, compared with memcpy and raw I/O"
TIMEOUT_S = 120.0
NAME_PREFIX = "lmcache-async-bench:"
FORMAT = RecordFormat(namespace="bench", layout="bytes", dtype="uint8", chunk_size=16)
TOKENS = np.zeros(16, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the command, and the payload sizes of the records, which are measured one after the other."""

    tier: str
    config: Path | None = None
    mib: int = 256
    connections: int = 4
    record_mib: tuple[int, ...] = (4, 32)


QUICK = {"mib": 2, "connections": 2, "record_mib": (1,)}


async def run(spec: TierSpec, settings: Settings, frame: Frame, *, third_party: bool) -> AsyncIterator[Row]:
    """Measure the tier of `spec`."""
    parameters: dict[str, Parameter] = {"tier": spec.name, "connections": settings.connections}
    for mib in settings.record_mib:
        with Records(mib, max(settings.mib // mib, 1)) as records:
            async with (
                open_tier(spec, records.arena, third_party=third_party) as tier,
                contextlib.AsyncExitStack() as stack,
            ):
                stack.push_async_callback(remove_all, records, tier)
                memcpy = {"memcpy, 1 thread": records.copy_probe(1)}
                puts, gets = stack.enter_context(_raw_limit(spec, records, settings.connections, frame))
                for row in await frame.compare(
                    cases(records, tier, memcpy | puts, memcpy | gets, parameters)
                ):
                    yield row
                if not tier.capabilities.removes:
                    frame.leave_out("removal of the records", f"the tier {spec.name} cannot remove")


@contextlib.asynccontextmanager
async def open_tier(spec: TierSpec, arena: Arena, *, third_party: bool = True) -> AsyncIterator[Tier]:
    tier = make_tier(spec, Registry(), third_party=third_party)
    if tier.capabilities.in_arena:
        raise ConfigError(
            f"the tier {spec.name} is the arena of the engine: measure it with lmcache-async bench memory"
        )
    tier.bind(arena)
    async with tier:
        yield tier


class Records(contextlib.ExitStack):
    """Sealed records for the probes, in an arena with room to read all of them. Used as a context manager.

    Attributes:
        names: Names for the clients of raw limits.
        keys: Keys in the tier; new ones for each put.
    """

    def __init__(self, mib: int, count: int) -> None:
        super().__init__()
        self.mib = mib
        self.count = count
        self.record_bytes = FORMAT.record_bytes(mib * MIB)
        self.nbytes = count * self.record_bytes
        check_memory(3 * self.nbytes)
        arena = Arena(2 * self.nbytes, self.record_bytes, huge_pages=True, prefault=True)
        self.arena = self.enter_context(contextlib.closing(arena))
        # Private memory, whose pages exist.
        self._copies = np.ones((count, self.record_bytes), dtype=np.uint8)
        self.buffers: list[Buffer] = []
        for number in range(count):
            buffer = arena.lease_nowait(self.record_bytes)
            assert buffer is not None  # the arena has room for twice as many
            buffer.array[FORMAT.header_bytes :] = number % 251
            self.buffers.append(self.enter_context(buffer))
        run = os.urandom(8).hex()
        self.names = [f"{NAME_PREFIX}{run}:{number}" for number in range(count)]
        self.keys: list[ChunkKey] = []
        self.seal()

    def seal(self) -> None:
        self.keys = [seal_record(buffer, ChunkKey(os.urandom(KEY_BYTES))) for buffer in self.buffers]

    def rate(self, start: float) -> float:
        """Return GB/s of all records since `start`."""
        return rate(self.nbytes, start)

    async def lease(self) -> list[Buffer]:
        """Return leased buffers, one to read each record into."""
        return [await self.arena.lease(self.record_bytes, timeout_s=TIMEOUT_S) for _ in self.buffers]

    def check(self, buffers: Sequence[Buffer], first: int = FORMAT.header_bytes) -> None:
        """Compare the records that were read from byte `first` on, and release the buffers."""
        right = 0
        for buffer, record in zip(buffers, self.buffers, strict=True):
            with buffer:
                right += np.array_equal(buffer.array[first:], record.array[first:])
        if right != self.count:
            raise self.lost(right)

    def lost(self, found: int) -> TierError:
        return TierError(
            f"{found} of {self.count} records were read back: the tier may be too small for {self.nbytes} bytes; give fewer --mib"
        )

    def read_probe(self, read: Callable[[list[memoryview]], Awaitable[float]]) -> Probe:
        """Return a probe that reads all records into leased buffers with `read` and compares them."""

        async def probe() -> float:
            buffers = await self.lease()
            rate = await read([buffer.view for buffer in buffers])
            self.check(buffers)
            return rate

        return probe

    def copy_probe(self, threads: int) -> Probe:
        """Return a probe of GB/s of memcpy of all records to private memory."""

        async def probe() -> float:
            return self.copy(self.buffers, threads)

        return probe

    def copy(self, buffers: Sequence[Buffer], threads: int) -> float:
        """Copy buffers to private memory on `threads` threads. Return GB/s."""
        pairs = zip(self._copies, [buffer.array for buffer in buffers], strict=True)
        return move_all(lambda _, pair: np.copyto(*pair), range(threads), pairs, self.nbytes)


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
    """Return the cases put and get of all records through `tier`, with their limits.

    A get from a tier with the capability `own_memory` copies nothing. Its figure includes copying the records once
    to private memory, on `threads` threads.
    """
    own_memory = tier.capabilities.own_memory
    facts: dict[str, Parameter] = {"record_bytes": records.record_bytes, "records": records.count}
    name, facts = f"records of {records.mib} MiB", facts | dict(parameters)

    async def put() -> float:
        await remove_all(records, tier)
        records.seal()
        start = time.perf_counter()
        await put_all(records, tier)
        return records.rate(start)

    async def get() -> float:
        await ensure_put(records, tier)
        start = time.perf_counter()
        buffers = await get_all(records, tier)
        seconds = time.perf_counter() - start
        if own_memory:
            # The start of the threads is not measured.
            seconds += records.nbytes / records.copy(buffers, threads) / 1e9
        records.check(buffers, first=0)
        return records.nbytes / seconds / 1e9

    verb = "get and read" if own_memory else "get"
    return [Case(f"put, {name}", UNIT, put, puts, facts), Case(f"{verb}, {name}", UNIT, get, gets, facts)]


async def put_all(records: Records, tier: Tier) -> None:
    for answer in await tier.put_many(list(zip(records.keys, records.buffers, strict=True))):
        if answer is not None:
            raise answer


async def ensure_put(records: Records, tier: Tier) -> None:
    if await tier.count_prefix(records.keys) < records.count:
        await put_all(records, tier)


async def get_all(records: Records, tier: Tier) -> list[Buffer]:
    got = await tier.get_many(records.keys, partial(records.arena.lease, timeout_s=TIMEOUT_S))
    buffers = [one for one in got if isinstance(one, Buffer)]
    if len(buffers) == records.count:
        return buffers
    for buffer in buffers:
        buffer.release()
    errors = (one for one in got if isinstance(one, Exception))
    raise next(errors, records.lost(len(buffers)))


async def remove_all(records: Records, tier: Tier) -> None:
    for key in records.keys:
        await tier.remove(key)


@contextlib.contextmanager
def _raw_limit(
    spec: TierSpec, records: Records, connections: int, frame: Frame
) -> Iterator[tuple[dict[str, Probe], dict[str, Probe]]]:
    """Open the raw limit of the tier's medium; yield its put and its get by name, nothing if there is none."""
    url, path = spec.options.get("url"), spec.options.get("path")
    puts: dict[str, Probe] = {}
    gets: dict[str, Probe] = {}
    name = "raw files" if isinstance(path, str) else "bare sockets"
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(path, str):
                root = Path(path.removeprefix("file://")).expanduser().absolute()
                # In the directory of the tier, which may be a mount point. The tier ignores hidden names.
                directory = tempfile.TemporaryDirectory(
                    dir=root if root.is_dir() else root.parent, prefix=".lmcache-async-bench-"
                )
                folder = Path(stack.enter_context(directory))
                files = stack.enter_context(
                    RawFiles(folder, pages(records.record_bytes), records.count, connections)
                )
                puts[name], gets[name] = files.put, files.get
            elif isinstance(url, str) and urlsplit(url).scheme in RESP_SCHEMES and "@" not in url:
                sockets = RespSockets(
                    url, connections, records.names, [buffer.view for buffer in records.buffers]
                )
                sockets.clear()
                stack.callback(sockets.clear)
                puts[name], gets[name] = sockets.put, records.read_probe(sockets.get)
        except (OSError, TierError) as error:
            frame.leave_out(name, str(error))
        yield puts, gets
