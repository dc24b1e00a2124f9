"""Records through the host tier, beside memcpy of the same bytes; the daemon is a process of its own.

A put is one copy from the engine's memory into the pool. A get copies nothing: what is measured is the lease
and the reading of it into a destination, beside a copy of as many bytes of private memory into the same one;
and the lease by itself, beside one hop to a thread and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmcache_async.bench.frame import Case, option
from lmcache_async.bench.host_daemon import READY
from lmcache_async.bench.tier_probes import opened_tier
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer, Bytes
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.outcome import no_room
from lmcache_async.types import Chunk, ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from lmcache_async.bench.frame import Frame, Probe, Row

UNIT = "GB/s"
MIB = 1 << 20
FORMAT = RecordFormat(namespace="bench", layout="bytes", dtype="uint8", chunk_size=16)
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    mib: int = option(256, "MiB that each put and each get moves")
    threads: int = option(2, "threads that copy, in the tier and in the memcpy beside it")
    record_mib: tuple[int, ...] = field(default=(4, 32))


QUICK = Settings(mib=2, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    for mib in settings.record_mib:
        nbytes = mib * MIB + FORMAT.header_bytes
        count = max(settings.mib // mib, 1)
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(_daemon((count + 1) * nbytes + 8 * MIB))
            arena = Arena(count * nbytes, nbytes, huge_pages=True, prefault=True)
            stack.callback(arena.close)
            moved = stack.enter_context(_moved(arena, count, nbytes, settings.threads))
            async with _opened(path, arena, settings.threads) as tier:
                for row in await frame.compare(_cases(moved, tier, f"{count} records of {mib} MiB")):
                    yield row


@dataclass(slots=True)
class _Moved:
    """What is moved, where to, and by which threads.

    Attributes:
        items: Sealed records in the engine's memory.
        target: Private memory of as many bytes.
        workers: For the copies that the tier's are compared with.
    """

    items: list[tuple[ChunkKey, Buffer]]
    target: Bytes
    workers: ThreadPoolExecutor
    threads: int

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for _, buffer in self.items)

    async def copy(self, sources: Sequence[Buffer], threads: int) -> None:
        """Into the target, one behind the other."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(
                loop.run_in_executor(self.workers, self._copy, sources, part, threads)
                for part in range(threads)
            )
        )

    def _copy(self, sources: Sequence[Buffer], part: int, threads: int) -> None:
        nbytes = sources[0].nbytes
        for index in range(part, len(sources), threads):
            np.copyto(self.target[index * nbytes : (index + 1) * nbytes], sources[index].array)

    def rate(self, start: float) -> float:
        return self.nbytes / (time.perf_counter() - start) / 1e9


def _cases(moved: _Moved, tier: Tier, name: str) -> list[Case]:
    own = [buffer for _, buffer in moved.items]
    copies: dict[str, Probe] = {
        f"memcpy, {threads} thread{'s' * (threads > 1)}": _memcpy(moved, own, threads)
        for threads in sorted({1, moved.threads})
    }
    parameters = {"record_bytes": own[0].nbytes, "records": len(own), "threads": moved.threads}
    return [
        Case(f"put, {name}", UNIT, _put(moved, tier), copies, parameters),
        Case(f"get and read, {name}", UNIT, _get(moved, tier), copies, parameters),
        Case(
            f"lease and release, {name}", "us", _lease(moved, tier), {"thread hop": _hop(moved)}, parameters
        ),
    ]


def _put(moved: _Moved, tier: Tier) -> Probe:
    async def probe() -> float:
        await tier.clear()
        start = time.perf_counter()
        answers = await tier.put_many(moved.items)
        rate = moved.rate(start)
        for answer in answers:
            if answer is not None:
                raise answer
        return rate

    return probe


def _get(moved: _Moved, tier: Tier) -> Probe:
    async def probe() -> float:
        await _ensure(moved, tier)
        start = time.perf_counter()
        buffers = await _leases(moved, tier)
        try:
            await moved.copy(buffers, moved.threads)
            return moved.rate(start)
        finally:
            for buffer in buffers:
                buffer.release()

    return probe


def _lease(moved: _Moved, tier: Tier) -> Probe:
    async def probe() -> float:
        await _ensure(moved, tier)
        start = time.perf_counter()
        for buffer in await _leases(moved, tier):
            buffer.release()
        return (time.perf_counter() - start) * 1e6

    return probe


def _memcpy(moved: _Moved, sources: Sequence[Buffer], threads: int) -> Probe:
    async def probe() -> float:
        start = time.perf_counter()
        await moved.copy(sources, threads)
        return moved.rate(start)

    return probe


def _hop(moved: _Moved) -> Probe:
    async def probe() -> float:
        start = time.perf_counter()
        await asyncio.get_running_loop().run_in_executor(moved.workers, int)
        return (time.perf_counter() - start) * 1e6

    return probe


async def _ensure(moved: _Moved, tier: Tier) -> None:
    if await tier.count_prefix([key for key, _ in moved.items]) < len(moved.items):
        await _put(moved, tier)()


async def _leases(moved: _Moved, tier: Tier) -> list[Buffer]:
    got = await tier.get_many([key for key, _ in moved.items], no_room)
    buffers = [one for one in got if isinstance(one, Buffer)]
    if len(buffers) < len(got):
        raise RuntimeError(f"{len(got) - len(buffers)} of {len(got)} records are not there")
    return buffers


@contextlib.contextmanager
def _moved(arena: Arena, count: int, nbytes: int, threads: int) -> Iterator[_Moved]:
    items: list[tuple[ChunkKey, Buffer]] = []
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(ThreadPoolExecutor(threads))
        for number in range(count):
            buffer = arena.lease_nowait(nbytes)
            if buffer is None:
                raise RuntimeError("the arena has no room for the records")
            stack.callback(buffer.release)
            items.append((_sealed(buffer, number), buffer))
        target = np.ones(count * nbytes, dtype=np.uint8)  # written to, so that its pages are there
        yield _Moved(items, target, workers, threads)


def _sealed(buffer: Buffer, number: int) -> ChunkKey:
    payload = buffer.nbytes - FORMAT.header_bytes
    buffer.array[FORMAT.header_bytes :] = number % 251
    chunk = Chunk(ChunkKey(number.to_bytes(16, "big")), 0, np.zeros(16, dtype=np.int32))
    seal(
        buffer.view,
        format=FORMAT,
        chunk=chunk,
        request_namespace="",
        shape=(payload,),
        payload_bytes=payload,
    )
    return chunk.key


@contextlib.contextmanager
def _daemon(nbytes: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lmca-") as directory:
        path = Path(directory) / "s"
        command = [sys.executable, "-m", "lmcache_async.bench.host_daemon", str(path), str(nbytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
            if daemon.stdout is None or daemon.stdout.readline().strip() != READY:
                raise RuntimeError("the daemon did not start")
            yield path


def _opened(path: Path, arena: Arena, threads: int) -> AbstractAsyncContextManager[Tier]:
    waits = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), TIMEOUT_S)
    options = {"socket": path, "copy_threads": threads, **waits}
    return opened_tier("host", options, arena, where="bench host")
