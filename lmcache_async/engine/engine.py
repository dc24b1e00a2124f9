"""The cache engine: async, the source of truth. Everything else is a door to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lmcache_async.config import EngineConfig
from lmcache_async.device.copier import Copier
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.builder import Parts, build, default_logger, instrument_of
from lmcache_async.engine.check import START_ERRORS, refusal
from lmcache_async.engine.clear import clear
from lmcache_async.engine.costs import LoadCosts
from lmcache_async.engine.lookups import Lookups
from lmcache_async.engine.pins import Pins
from lmcache_async.engine.results import (
    EngineStatistics,
    FirstPresent,
    LookupResult,
    merge_retrieved,
    merge_stored,
)
from lmcache_async.engine.runners import Once, caller_is_cancelled, countdown, open_runners
from lmcache_async.engine.scrub import scrub
from lmcache_async.engine.status import status_page
from lmcache_async.engine.tokens import TokenVerbs
from lmcache_async.errors import BudgetExceededError, EngineClosedError, TierError
from lmcache_async.hashing import Namespace
from lmcache_async.observability.instrument import Instrument, Several
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.observability.totals import Totals
from lmcache_async.pipeline.batch import Batch, RetrieveRequest, StoreRequest
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.registry import Registry
from lmcache_async.tiers.base import ScrubReport
from lmcache_async.tiers.layers.notice import Watcher
from lmcache_async.types import ChunkKey, RequestPlan, RetrieveReport, StoreReport
from lmcache_async.web.recent import RecentRequests

T = TypeVar("T")


class CacheEngine(TokenVerbs):
    """Stores the KV of prompts' chunks in tiers, and brings it back.

    Made by `open`; used on one event loop. Calls may overlap. A failure of a tier, or a deadline, is a
    miss or a counted drop in the report, never an exception; bugs and cancellation do propagate, and
    then every lease the call held is back.

    Attributes:
        totals: What stores and retrieves came to; with `statistics` it is all that metrics are made of.
        status_url: Where the status page is; None where none is configured.
    """

    status_url: str | None = None

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts,
        namespace: Namespace,
        layout: KVLayout,
        instrument: Instrument,
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.layout = layout
        self._parts = parts
        self.totals = Totals()
        self._recent = RecentRequests()
        listening = (self._recent,) if config.http.listen is not None else ()
        self._instrument = Several(self.totals, instrument, *listening)
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()
        self._pins = Pins(
            max_buffers=int(parts.arena.num_slabs * config.vllm.max_pinned_fraction),
            ttl_s=config.vllm.lookup_pin_ttl_s,
        )
        self._costs = LoadCosts(parts.stack, parts.arena, config.chunk_size)
        self._lookups = Lookups(
            parts.stack, self._pins, self._costs, timeout_s=config.retrieve.timeout_s, spawn=self._spawn
        )
        self._runners = open_runners(config, parts, max_pinned=self._pins.max_buffers)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: EngineConfig,
        *,
        layout: KVLayout,
        namespace: Namespace,
        instrument: Instrument | None = None,
        logger: LimitedLogger | None = None,
        registry: Registry | None = None,
        watcher: Watcher | None = None,
        replica: int = 0,
    ) -> AsyncIterator[CacheEngine]:
        """An engine over the device memory that `layout` describes; closed at the end of the block.

        Closing waits at most `config.shutdown_timeout_s` for what is under way and for what slower tiers
        have still to write, then frees everything. What persistent tiers hold stays.

        Args:
            config: The engine's.
            layout: Of the device memory.
            namespace: What the KV depends on; also this process's rank.
            instrument: Is told of stores, retrieves and plans, instead of the log.
            logger: Of the engine and its tiers.
            registry: The installed plug-ins.
            watcher: Is told which tier keeps which chunk.
            replica: The number of this data-parallel replica. Replicas have the same keys; each has its own
                directories and its own port of the status page.

        Raises:
            ConfigError: A name or an option is wrong, or a tier or the status page cannot be opened.
            ChainError: The stages of a chain do not fit.
        """
        logger = logger or default_logger()
        registry = registry or Registry()
        try:
            parts = build(config, layout, namespace, logger, registry, watcher, replica=replica)
        except START_ERRORS as error:
            raise refusal(error, config, registry) from error
        try:
            engine = cls(config, parts, namespace, layout, instrument_of(config, logger, instrument))
            await parts.stack.open(parts.arena)
        except BaseException:
            parts.free()
            raise
        try:
            async with status_page(engine, engine._recent, replica=replica) as engine.status_url:
                yield engine
        finally:
            await engine._aclose()

    @property
    def copier(self) -> Copier:
        return self._parts.copier

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> LookupResult:
        """How many leading chunks are there, and where.

        With a `lookup_id` those in host memory stay there until `unpin(lookup_id)`, or until the
        configured time has passed.
        """
        self._check_open()
        return await self._lookups.prefix(keys, lookup_id)

    async def first_present(
        self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None
    ) -> FirstPresent | None:
        """The first key that any tier has; None when there is none, or no answer in time.

        With a `lookup_id` it is pinned, beside what that lookup has pinned, if it is in host memory.
        """
        self._check_open()
        return await self._lookups.first(keys, lookup_id)

    def unpin(self, lookup_id: str) -> None:
        """End the pins of a lookup; unknown ids are fine."""
        self._pins.release(lookup_id)

    async def store_chunks(self, request: StoreRequest) -> StoreReport:
        """Give the request's chunks to every tier; those already everywhere are passed over.

        Ends when the slowest tier has taken or refused them, or at the deadline.
        """
        copied = Once(request.on_copied)
        return await self._track(self._do_store(request, copied), ended=copied)

    async def retrieve_chunks(self, request: RetrieveRequest) -> RetrieveReport:
        """Bring the longest prefix of the request's chunks to its rows."""
        return await self._track(self._do_retrieve(request))

    async def prefetch_chunks(self, request: RetrieveRequest) -> int:
        """Bring the longest prefix of the request's chunks into host memory; how many tokens it has."""

        async def do() -> int:
            try:
                batches: list[Batch] = await self._runners.prefetch.run(
                    request, timeout_s=self.config.retrieve.timeout_s
                )
            except (BudgetExceededError, TierError):
                return 0
            return sum(len(chunk.tokens) for batch in batches for chunk in batch.chunks)

        return await self._track(do())

    async def clear(self, *, memory_only: bool = False) -> int:
        """Forget every chunk, or with `memory_only` those of tiers that do not outlive the process.

        Stores under way end first, so that nothing old arrives behind the clearing.

        Raises:
            TierError: They did not end in time; or a tier could not be cleared, while the others were.
        """
        self._check_open()
        timeout_s = self.config.store.timeout_s
        return await clear(self._parts.stack, self._running, timeout_s=timeout_s, memory_only=memory_only)

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until slower tiers have written what they have queued; False when that took too long."""
        return await self._parts.stack.flush(timeout_s=timeout_s)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> dict[str, ScrubReport]:
        """Read and prove the records of each tier, at most at that rate; see `Tier.scrub`."""
        self._check_open()
        return await scrub(self._parts.stack.tiers, max_bytes_per_s)

    def planned(self, plan: RequestPlan) -> None:
        """A request was admitted: told to the instruments, and on the status page."""
        self._instrument.planned(plan)

    def statistics(self) -> EngineStatistics:
        parts, pinned = self._parts, self._pins.count
        return EngineStatistics.of(parts.arena, parts.stack, pinned_chunks=pinned, running=len(self._running))

    async def _do_store(self, request: StoreRequest, copied: Once) -> StoreReport:
        start = time.perf_counter()
        left = countdown(self.config.store.timeout_s)
        try:
            batches = await self._runners.store.run(request, timeout_s=left(), on_copied=copied)
        except (BudgetExceededError, TierError) as error:
            batches = [BatchStored(dropped=Counter({type(error).__name__: len(request.chunks) or 1}))]
        waiting = [outcome for batch in batches for outcome in batch.outcomes if not outcome.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=left())
        report = merge_stored(batches, start, copied.time or start)
        self._instrument.stored(request.request_id, report)
        return report

    async def _do_retrieve(self, request: RetrieveRequest) -> RetrieveReport:
        start = time.perf_counter()
        try:
            batches = await self._runners.retrieve.run(request, timeout_s=self.config.retrieve.timeout_s)
        except (BudgetExceededError, TierError) as error:
            batches = [RetrieveReport(cause=type(error).__name__)]
        asked = sum(len(chunk.tokens) for chunk in request.chunks) or len(request.tokens)
        report = merge_retrieved(batches, asked, start)
        if not request.waited_for:  # its time is the model's too
            self._costs.note(report)
        self._instrument.retrieved(request.request_id, report)
        return report

    async def _track(
        self, coroutine: Coroutine[Any, Any, T], *, ended: Callable[[], None] = lambda: None
    ) -> T:
        """Run as a task of the engine's own, so that closing can end it.

        Args:
            ended: Called when the task has really ended: a caller cancelled twice is gone before that.
        """
        try:
            self._check_open()
        except EngineClosedError:
            coroutine.close()
            ended()
            raise
        task = asyncio.ensure_future(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: ended())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled() and not caller_is_cancelled():
                raise EngineClosedError("the engine was closed during the call") from None
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            del task  # its traceback holds views of slabs: not for as long as somebody keeps ours

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the calls; closing ends it like them."""
        if self._closed:
            return work.close()
        task = asyncio.ensure_future(work)
        self._running.add(task)
        return task.add_done_callback(self._running.discard)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    async def _aclose(self) -> None:
        """Cancelled, it waits no longer for writes, but frees everything all the same."""
        self._closed = True
        timeout_s = self.config.shutdown_timeout_s
        left = countdown(timeout_s)
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=timeout_s)
        except asyncio.CancelledError:
            left = countdown(0.0)
            raise
        finally:
            async with contextlib.AsyncExitStack() as steps:  # each is taken, whatever becomes of the others
                steps.callback(self._parts.free)
                steps.push_async_callback(lambda: self._parts.stack.aclose(timeout_s=left()))
                steps.callback(self._pins.close)
                for task in self._running:
                    task.cancel()
                if self._running:
                    await asyncio.wait(self._running, timeout=timeout_s)
