"""Cost of the event loop and of all Python code per chunk: an engine with a copier that copies nothing.

Records have minimum size and come in batches of the usual number of chunks. Stores and retrieves of few and
of many chunks show the cost per call, and that the cost per chunk does not grow with the number of chunks.
The limits are one iteration of the loop, and one hop to a thread and back. The callbacks of the loop are
counted too.

As in vLLM, earlier objects of the process are excluded from garbage collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from lmcache_async.bench.measure import Case, Frame, Parameter, Probe, Row
from lmcache_async.bench.memory import CacheForm, PromptCache
from lmcache_async.device.copier import CopyJob, Fence
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.progress import LoadProgress
from lmcache_async.engine.engine import CacheEngine
from tools.benchmarks.command import option

UNIT = "us/chunk"
CALLS = "loop callbacks/chunk"
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    batch: int = option(16, "chunks of a batch; 32 MiB contain 16 records of 2 MiB")
    chunks: tuple[int, ...] = field(default=(64, 512, 4096, 16384))
    single: int = field(default=512)  # number of chunks, with batches of one chunk
    turns: int = field(default=1000)  # iterations of the loop, or thread hops, for one figure of a limit


QUICK = Settings(chunks=(8, 64), single=8, turns=10)


class NoCopier:
    """A copier that takes no time. Like the CPU copier, it returns checksums."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    def fence(self) -> Fence | None:
        return None

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        return [bytes(16) for _ in jobs] if digest else None

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        pass

    def close(self) -> None:
        pass


def _no_copiers(layouts: Sequence[KVLayout], **_: Any) -> list[NoCopier]:
    return [NoCopier(layout) for layout in layouts]


class CountingLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, with a count of the callbacks scheduled."""

    def __init__(self) -> None:
        self.calls = 0
        super().__init__()

    # Typeshed's type of the arguments cannot be repeated in a subclass.
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.calls += 1
        return super().call_soon(callback, *arguments, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.calls += 1
        return super().call_soon_threadsafe(callback, *arguments, context=context)


@dataclass(frozen=True, slots=True)
class Batches:
    """A prompt, and engines for it with batches of `batch` chunks."""

    cache: PromptCache
    batch: int

    @property
    def name(self) -> str:
        return f"{self.cache.num_chunks} chunks in batches of {self.batch}"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {"chunks": self.cache.num_chunks, "batch": self.batch}

    @contextlib.asynccontextmanager
    async def open(self, **more: Any) -> AsyncIterator[CacheEngine]:
        batch_bytes = self.batch * self.cache.slab_bytes
        settings: dict[str, Any] = {"store.allocate_timeout_s": 10.0}
        for verb in ("store", "retrieve"):
            settings |= {
                f"{verb}.batch_bytes": batch_bytes,
                f"{verb}.max_in_flight_bytes": 8 * batch_bytes,  # as by default
                f"{verb}.timeout_s": 60.0,
            }
        async with contextlib.AsyncExitStack() as stack:
            with mock.patch("lmcache_async.engine.builder.open_copiers", _no_copiers):
                engine = await stack.enter_async_context(self.cache.open(**settings | more))
            yield engine


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    _freeze_heap()
    async with contextlib.AsyncExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        limits = {
            "one asyncio.sleep(0)": _turns(settings.turns),
            "one thread hop": _hops(settings.turns, pool),
        }
        cases, counted = [], []
        sizes = [(chunks, settings.batch) for chunks in settings.chunks]
        for chunks, batch in [*sizes, (settings.single, 1)]:
            batches = Batches(PromptCache(CacheForm(chunks * CHUNK_TOKENS)), batch)
            engine = await stack.enter_async_context(batches.open())
            cases += _times(batches, engine, limits)
            counted += _counts(batches)
        for row in await frame.compare(cases):
            yield row
    # Counts hardly vary: one round is enough, because each takes an engine of its own.
    for row in await dataclasses.replace(frame, rounds=1).compare(counted):
        yield row


def _freeze_heap() -> None:
    """Exclude the objects of torch from garbage collection, whose cost would be attributed to chunks."""
    gc.collect()
    gc.freeze()


def _times(batches: Batches, engine: CacheEngine, limits: Mapping[str, Probe]) -> list[Case]:
    cache, name = batches.cache, batches.name
    store, retrieve = cache.probes(engine, lambda seconds: 1e6 * seconds / cache.num_chunks)
    return [
        Case(f"store, {name}", UNIT, store, limits, batches.parameters),
        Case(f"retrieve, {name}", UNIT, retrieve, limits, batches.parameters),
    ]


def _counts(batches: Batches) -> list[Case]:
    limits = {"one a batch": _one_a_batch(batches)}
    return [
        Case(f"{verb}, {batches.name}", CALLS, _calls(batches, store=store), limits, batches.parameters)
        for verb, store in (("store", True), ("retrieve", False))
    ]


def _calls(batches: Batches, *, store: bool) -> Probe:
    """Return the callbacks scheduled by one store or retrieve, per chunk, on a loop of its own."""
    cache = batches.cache

    async def count() -> float:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, CountingLoop):
            raise TypeError(f"a {type(loop).__name__} does not count")
        async with batches.open() as engine:
            if not store:
                await cache.store(engine)
            before = loop.calls
            await (cache.store if store else cache.retrieve)(engine)
            return (loop.calls - before) / cache.num_chunks

    def in_thread() -> float:
        with asyncio.Runner(loop_factory=CountingLoop) as runner:
            return runner.run(count())

    async def probe() -> float:
        return await asyncio.to_thread(in_thread)

    return probe


def _one_a_batch(batches: Batches) -> Probe:
    async def probe() -> float:
        return 1 / batches.batch

    return probe


def _turns(count: int) -> Probe:
    async def probe() -> float:
        start = time.perf_counter()
        for _ in range(count):
            await asyncio.sleep(0)
        return 1e6 * (time.perf_counter() - start) / count

    return probe


def _hops(count: int, pool: ThreadPoolExecutor) -> Probe:
    async def probe() -> float:
        loop = asyncio.get_running_loop()
        start = time.perf_counter()
        for _ in range(count):
            await loop.run_in_executor(pool, _nothing)
        return 1e6 * (time.perf_counter() - start) / count

    return probe


def _nothing() -> None:
    pass
