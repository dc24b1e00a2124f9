"""The asynchronous cache engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from lmcache_async.config import EngineConfig
from lmcache_async.device.copier import Copier, Fence
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.arguments import Mask, leading_false, row_ids
from lmcache_async.engine.builder import EngineGroup, EngineParts, build, default_logger
from lmcache_async.engine.check import START_ERRORS, refusal
from lmcache_async.engine.costs import LoadCosts
from lmcache_async.engine.lookup import FirstPresent, LookupResult, Lookups, MemoryLookups, Pins
from lmcache_async.engine.metrics import EngineStatistics
from lmcache_async.engine.status import EngineSource
from lmcache_async.errors import BudgetExceededError, EngineClosedError, TierError, TierUnavailableError
from lmcache_async.hashing import ChunkHasher, Namespace, RequestNamespace, TokenIds, as_tokens
from lmcache_async.hashing.namespace import namespace_id
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.endpoint import status_server
from lmcache_async.metrics.instrument import Instrument, LogInstrument
from lmcache_async.metrics.tracing import TracingInstrument
from lmcache_async.pipeline.batch import Batch, Request, RetrieveRequest, StoreRequest
from lmcache_async.pipeline.report import BatchStored, Drops
from lmcache_async.pipeline.runner import Once
from lmcache_async.registry import Registry
from lmcache_async.tiers.base import ScrubReport
from lmcache_async.tiers.handle import Watcher
from lmcache_async.tiers.stack import TierStack
from lmcache_async.types import ChunkKey, RequestPlan, RetrieveReport, StoreReport, Tokens

AnyRequest = TypeVar("AnyRequest", bound=Request)

NO_NAMESPACE = RequestNamespace()


class CacheEngine:
    """Stores the KV cache of prompt chunks in tiers and loads it back.

    Create an engine with `open` and use it on the event loop on which it was opened; the coroutines raise RuntimeError on
    another one. Calls may overlap. The failure of a tier or an expired deadline is a miss or a counted drop in the report,
    never an exception. Bugs and cancellation propagate; all leases of the call are released before.

    `lookup`, `store`, `retrieve` and `prefetch` take token ids and rows of the paged cache. The methods
    named `..._keys` and `..._chunks` take chunks that the caller has hashed.

    An engine serves one or more KV cache groups of a model: sets of layers with a block table of their own. They share
    memory, tiers and limits. Calls with token ids use the first group, calls with chunks name a group in the request.

    Attributes:
        metrics: Counts of stores, retrieves and tiers. `metrics.read()` returns the values of all series.
        status_url: URL of the status page; None if it is not configured.
    """

    status_url: str | None = None

    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        groups: Sequence[EngineGroup],
        instruments: Sequence[Instrument],
    ) -> None:
        self.config = config
        self.namespace = groups[0].namespace
        self.layout = groups[0].layout
        self._engine_root = self.namespace.root()
        self.metrics = parts.stack.metrics
        self.metrics.sources.append(lambda out: self.statistics().add_to(out))
        self._parts = parts
        self._instruments: tuple[Instrument, ...] = (self.metrics, *instruments)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._clears = 0  # running calls of `clear`
        self._calls: dict[asyncio.Future[None], asyncio.Timeout] = {}  # by the future of a call's end
        self._background: set[asyncio.Task[None]] = set()
        self._lookups = Lookups(
            stack=parts.stack,
            pins=Pins(max_buffers=parts.max_pinned, ttl_s=config.vllm.lookup_pin_ttl_s),
            costs=LoadCosts(parts.stack, parts.arena, config.chunk_size),
            timeout_s=config.retrieve.timeout_s,
            spawn=self._spawn,
        )

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
        memory_watcher: Watcher | None = None,
        replica: int = 0,
        more_groups: Sequence[EngineGroup] = (),
    ) -> AsyncIterator[CacheEngine]:
        """Open an engine for the device memory that `layout` describes, and close it after the block.

        Closing waits up to `config.shutdown_timeout_s` for running calls and queued writes of slower tiers. It then
        cancels the calls, waits up to the same time for their ends, closes the tiers and frees all memory. The content
        of persistent tiers stays.

        Args:
            config: Configuration of the engine.
            layout: Layout of the paged KV cache.
            namespace: Everything besides tokens that the KV cache depends on; also contains the rank.
            instrument: Receives stores, retrieves and plans, instead of the log.
            logger: Logger of the engine and its tiers.
            registry: Installed plug-ins.
            watcher: Receives the chunk events of all tiers.
            memory_watcher: Receives the chunk events of tiers in the arena with a local index. These events are complete;
                see `watched_memory`.
            replica: Number of this data-parallel replica. Replicas have the same keys; each has its own
                directories and its own port of the status page.
            more_groups: Further KV cache groups of the model; `layout` and `namespace` are those of the first one.

        Raises:
            ConfigError: A name or an option is wrong, or the status page cannot be opened.
            ChainError: The stages of a chain do not fit together.
            MissingDependencyError: A plug-in needs a package that is not installed.
            TierError: A tier cannot be opened. Other exceptions of a tier's `__aenter__` are raised unchanged.
        """
        logger = logger or default_logger()
        registry = registry or Registry()
        try:
            groups = (EngineGroup(layout, namespace), *more_groups)
            parts = build(
                config, groups, logger, registry, watcher, memory_watcher=memory_watcher, replica=replica
            )
        except START_ERRORS as error:
            raise refusal(error, config, registry) from error
        try:
            instruments = [instrument or LogInstrument(logger.logger)]
            if config.tracing.enabled:
                instruments.append(TracingInstrument())
            engine = cls(config, parts, groups, instruments)
            await parts.stack.open(parts.arena)
        except BaseException:
            parts.free()
            raise
        try:
            _log_open(logger.logger, config, groups, parts.stack)
            async with contextlib.AsyncExitStack() as page:
                if config.http.listen is not None:
                    source = EngineSource(config, namespace, engine.metrics, engine.statistics)
                    engine._instruments += (source.recent,)
                    number = replica * namespace.world_size + namespace.rank
                    server = await page.enter_async_context(status_server(source, config.http, rank=number))
                    engine.status_url = server.url
                yield engine
        finally:
            await engine._aclose()

    @property
    def copier(self) -> Copier:
        return self._parts.groups[0].copier

    async def lookup(
        self,
        tokens: TokenIds,
        *,
        namespace: RequestNamespace = NO_NAMESPACE,
        lookup_id: str | None = None,
    ) -> int:
        """Return the number of leading tokens that are stored.

        Args:
            tokens: Token ids: a list, an array or a tensor of integers.
            namespace: Everything else that the request's KV cache depends on.
            lookup_id: If given, chunks in host memory are pinned until `unpin(lookup_id)`.
        """
        ids, own = as_tokens(tokens), self.namespace
        whole = len(ids) - len(ids) % self.layout.tokens_per_row
        hasher = ChunkHasher(
            self._root(namespace), chunk_size=own.chunk_size, algorithm=own.algorithm, hash_key=own.hash_key
        )
        keys, tail = hasher.extend_keys(ids[:whole]), hasher.tail()
        result = await self.lookup_keys(keys if tail is None else [*keys, tail.key], lookup_id=lookup_id)
        return min(result.count * own.chunk_size, whole)

    async def store(
        self,
        tokens: TokenIds,
        rows: Any,
        *,
        mask: Mask | None = None,
        namespace: RequestNamespace = NO_NAMESPACE,
        request_id: str = "",
        fence: Fence | None = None,
    ) -> StoreReport:
        """Store the KV cache of `tokens` from `rows` of the paged cache.

        Args:
            tokens: Token ids of the whole prefix, from position 0. Tokens, rows and mask are copied when the call starts.
            rows: One row for each `layout.tokens_per_row` tokens: the slot mapping, or block ids. The KV in these rows must
                not change until the call ends.
            mask: Booleans of shape (len(tokens),), as a tensor, an array or a list. Leading False tokens are
                not stored.
            namespace: Everything else that the request's KV cache depends on.
            request_id: Name of the request in log lines.
            fence: Event that the copy waits for: the result of `copier.fence()` on the model's thread. By default it
                is taken here. Other events of the device are not accepted.

        Raises:
            TypeError: A token or a row is not an integer, or the mask has values other than booleans.
            ValueError: A token or a row is out of bounds, rows are missing, or the mask has another form.
        """
        return await self.store_chunks(
            self._request(StoreRequest, as_tokens(tokens), rows, mask, namespace, request_id, fence)
        )

    async def retrieve(
        self,
        tokens: TokenIds,
        rows: Any,
        *,
        mask: Mask | None = None,
        namespace: RequestNamespace = NO_NAMESPACE,
        request_id: str = "",
        fence: Fence | None = None,
    ) -> torch.Tensor:
        """Load the longest stored prefix of `tokens` into `rows`.

        Args and errors: as in `store`. Leading False tokens of `mask` and tokens of rows -1 are not written.
        A row is written as a whole or not at all. Rows other than -1 must be distinct: a row that occurs twice contains the
        KV of any of its tokens.

        Returns:
            Bool of shape (len(tokens),) on the CPU: True for each loaded token. Loaded tokens are
            consecutive, except that tokens of a row -1 are always False.
        """
        ids = as_tokens(tokens)
        request = self._request(RetrieveRequest, ids, rows, mask, namespace, request_id, fence)
        report = await self.retrieve_chunks(request)
        result = torch.zeros(len(ids), dtype=torch.bool, device="cpu")  # not torch's default device
        # The hit begins with the chunk of the first wanted row.
        is_wanted = request.row_ids >= 0
        wanted = np.flatnonzero(is_wanted)
        if len(wanted):
            skip = int(wanted[0]) * self.layout.tokens_per_row
            end = skip - skip % self.namespace.chunk_size + report.hit_tokens
            written = np.repeat(is_wanted, self.layout.tokens_per_row)
            result[skip:end] = torch.from_numpy(written[skip:end])
        return result

    async def prefetch(self, tokens: TokenIds, *, namespace: RequestNamespace = NO_NAMESPACE) -> int:
        """Load the longest stored prefix of `tokens` into host memory and return its number of tokens."""
        ids = as_tokens(tokens)
        return await self.prefetch_chunks(
            RetrieveRequest(
                tokens=ids,
                row_ids=np.zeros(len(ids) // self.layout.tokens_per_row, np.int64),
                root=self._root(namespace),
                request_namespace=self._label(namespace),
            )
        )

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> LookupResult:
        """Return how many leading chunks are stored, and in which tiers.

        With a `lookup_id` the chunks in host memory are pinned until `unpin(lookup_id)`, or until
        `vllm.lookup_pin_ttl_s` has passed.
        """
        self._check_open()
        return await self._lookups.prefix(keys, lookup_id)

    async def first_present(
        self, runs: Sequence[Sequence[ChunkKey]], *, lookup_id: str | None = None
    ) -> FirstPresent | None:
        """Return the first run of keys that is stored completely; None if there is none or the deadline expires.

        With a `lookup_id` its chunks in host memory are pinned, in addition to earlier pins of that id.
        """
        self._check_open()
        return await self._lookups.first(runs, lookup_id)

    def memory_lookup(self) -> MemoryLookups | None:
        """Return a lookup of one prompt in host memory, which any thread may use; None if the engine has no tier."""
        return MemoryLookups.of_stack(self._parts.stack) if self._parts.stack.tiers else None

    def watched_memory(self) -> str | None:
        """Return the id of the fastest tier if `memory_watcher` receives all of its changes and no layer may change its answers.

        None otherwise.
        """
        tiers = self._parts.stack.tiers
        if tiers and tiers[0].tier.capabilities.local_index and tiers[0].tier.count_in_memory(()) is not None:
            return tiers[0].id
        return None

    def unpin(self, lookup_id: str) -> None:
        """Release the pins of a lookup. Unknown ids are ignored."""
        self._lookups.pins.release(lookup_id)

    async def store_chunks(self, request: StoreRequest) -> StoreReport:
        """Store the chunks of the request in every tier that does not have them.

        Returns when the slowest tier has stored or refused them, or at the deadline.
        """
        copied = Once(request.on_copied)
        try:
            async with self._call():
                start = time.perf_counter()
                left = _countdown(self.config.store.timeout_s)
                try:
                    batches = await self._parts.groups[request.group].store.run(
                        request, timeout_s=left(), on_copied=copied
                    )
                except (BudgetExceededError, TierError) as error:
                    chunks = len(request.chunks) or self._count_chunks(request)
                    batches = [BatchStored(dropped=Counter({type(error).__name__: chunks}))]
                waiting = [write for batch in batches for write in batch.outcomes.pending()]
                if waiting:
                    await asyncio.wait(waiting, timeout=left())
                report = _merge_stored(batches, start, copied.time or start)
                if request.reported:
                    self.report_stored(request.request_id, report)
                return report
        finally:
            copied()

    async def retrieve_chunks(self, request: RetrieveRequest) -> RetrieveReport:
        """Load the longest stored prefix of the request's chunks into its rows."""
        async with self._call():
            start = time.perf_counter()
            try:
                if self._clears:  # a chunk that is about to be deleted could be promoted
                    batches = [RetrieveReport(cause="miss")]
                else:
                    batches = await self._parts.groups[request.group].retrieve.run(
                        request, timeout_s=self.config.retrieve.timeout_s
                    )
            except (BudgetExceededError, TierError) as error:
                batches = [RetrieveReport(cause=type(error).__name__)]
            asked = sum(len(chunk.tokens) for chunk in request.chunks) or len(request.tokens)
            report = _merge_retrieved(batches, asked, start)
            if request.progress is None:  # otherwise the time includes computation of the model
                self._lookups.costs.note(report)
            if request.reported:
                self.report_retrieved(request.request_id, report)
            return report

    def report_stored(self, request_id: str, report: StoreReport) -> None:
        """Count and log a store of requests with `reported=False`. Called on the thread of the event loop."""
        for instrument in self._instruments:
            instrument.stored(request_id, report)

    def report_retrieved(self, request_id: str, report: RetrieveReport) -> None:
        """Count and log a retrieve of requests with `reported=False`. Called on the thread of the event loop."""
        for instrument in self._instruments:
            instrument.retrieved(request_id, report)

    async def prefetch_chunks(self, request: RetrieveRequest) -> int:
        """Load the longest stored prefix of the request's chunks into host memory; return its tokens."""
        async with self._call():
            if self._clears:
                return 0
            try:
                batches: list[Batch] = await self._parts.groups[request.group].prefetch.run(
                    request, timeout_s=self.config.retrieve.timeout_s
                )
            except (BudgetExceededError, TierError):
                return 0
            # Chunks that were read may have no place in host memory, or may have been evicted for later ones.
            chunks = [chunk for batch in batches for chunk in batch.chunks]
            kept, _ = await self._parts.stack.plan([chunk.key for chunk in chunks], in_arena=True)
            return sum(len(chunk.tokens) for chunk in chunks[: len(kept)])

    async def clear(self, *, memory_only: bool = False) -> int:
        """Delete all chunks and return their number. A tier that cannot list its records keeps them.

        Running calls and queued writes end first, so that none of them stores a chunk afterwards. Loads that are
        started meanwhile are misses, so that none of them promotes a chunk from a tier that is not cleared yet.

        Args:
            memory_only: Whether to keep the chunks of persistent tiers.

        Raises:
            EngineClosedError: The engine is closed, or was closed before all tiers were cleared.
            TierError: Calls or writes did not end in time, and nothing was deleted; or a tier could not be
                cleared, and the other tiers were.
        """
        self._check_open()
        self._clears += 1
        try:
            timeout_s = self.config.store.timeout_s
            if running := self._running():
                _, late = await asyncio.wait(running, timeout=timeout_s)
                if late:
                    raise TierUnavailableError(
                        f"{len(late)} calls did not end in {timeout_s} s; nothing was cleared"
                    )
            if not await self.flush(timeout_s=timeout_s):
                raise TierUnavailableError(f"writes did not end in {timeout_s} s; nothing was cleared")
            removed = 0
            failure: TierError | None = None
            for stacked in self._parts.stack.tiers:
                try:
                    if not (memory_only and stacked.tier.capabilities.persistent):
                        removed += await stacked.tier.clear()
                except TierError as error:
                    failure = failure or error
            if failure is not None:
                self._check_open()  # otherwise the tier may have failed because it was closed
                raise failure
            return removed
        finally:
            self._clears -= 1

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until slower tiers have written their queues; return False if the timeout expires."""
        self._check_loop()
        return await self._parts.stack.flush(timeout_s=timeout_s)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> dict[str, ScrubReport]:
        """Read and verify the records of all tiers, one tier after the other; see `Tier.scrub`.

        The failure of a whole tier counts as one error in its report.

        Args:
            max_bytes_per_s: Limit of the read rate.
        """
        self._check_open()
        reports = {}
        for stacked in self._parts.stack.tiers:
            try:
                reports[stacked.id] = await stacked.tier.scrub(max_bytes_per_s=max_bytes_per_s)
            except TierError:
                reports[stacked.id] = ScrubReport(errors=1)
        return reports

    def planned(self, plan: RequestPlan) -> None:
        """Report the plan of an admitted request to the instruments and the status page."""
        for instrument in self._instruments:
            instrument.planned(plan)

    def statistics(self) -> EngineStatistics:
        arena, stack = self._parts.arena, self._parts.stack
        return EngineStatistics(
            arena=arena.statistics(),
            tiers={stacked.id: stacked.tier.statistics() for stacked in stack.tiers},
            writers={s.id: s.writer.statistics() for s in stack.tiers if s.writer is not None},
            layers={stacked.id: stacked.tier.layer_statistics() for stacked in stack.tiers},
            counts=stack.metrics.tier_counts(),
            pinned_chunks=self._lookups.pins.count,
            running=len(self._running()),
            late_calls=stack.late_calls,
            in_arena=frozenset(s.id for s in stack.tiers if not s.leaves_memory),
        )

    def _count_chunks(self, request: StoreRequest) -> int:
        """Return the number of chunks that the tokens of a request are divided into."""
        tokens = len(request.tokens) - len(request.tokens) % self.layout.tokens_per_row
        whole, rest = divmod(tokens, self.namespace.chunk_size)
        return whole + bool(rest and self.config.store.partial_chunks)

    def _root(self, namespace: RequestNamespace) -> bytes:
        own = self.namespace
        return namespace.root(self._engine_root, own.algorithm, own.hash_key)

    def _label(self, namespace: RequestNamespace) -> str:
        return namespace.keyed_label(self.namespace.hash_key)

    def _request(
        self,
        request_type: type[AnyRequest],
        tokens: Tokens,
        rows: Any,
        mask: Mask | None,
        namespace: RequestNamespace,
        request_id: str,
        fence: Fence | None,
    ) -> AnyRequest:
        unit = self.layout.tokens_per_row
        ids = row_ids(rows, len(tokens), unit, self.layout.num_rows)
        ids[: -(-leading_false(mask, len(tokens)) // unit)] = -1
        return request_type(
            request_id=request_id,
            tokens=tokens,
            row_ids=ids,
            root=self._root(namespace),
            request_namespace=self._label(namespace),
            fence=self.copier.fence() if fence is None else fence,
        )

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Run the block as a call of the engine. Closing the engine ends the call by letting a timeout expire.

        Raises:
            EngineClosedError: The engine is closed, or was closed in the block.
        """
        self._check_open()
        ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(None) as limit:
                self._calls[ended] = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineClosedError("the engine was closed during the call") from None
        finally:
            self._calls.pop(ended, None)
            ended.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start background work, which is cancelled when the engine closes."""
        if self._closed:
            return work.close()
        task = asyncio.ensure_future(work)
        self._background.add(task)
        return task.add_done_callback(self._background.discard)

    def _running(self) -> set[asyncio.Future[None]]:
        """Return futures that are done when the running calls and background work have ended."""
        return {*self._calls, *self._background}

    def _check_loop(self) -> None:
        """Refuse a call from another event loop, which would wait for futures that never wake it."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "the engine was opened on another event loop; call it there, with asyncio.run_coroutine_threadsafe from other"
                " threads, or use LMCacheEngine, which any thread may call"
            )

    def _check_open(self) -> None:
        self._check_loop()
        if self._closed:
            raise EngineClosedError("the engine is closed")

    async def _aclose(self) -> None:
        """Close the engine. On cancellation it stops waiting for writes and still frees everything."""
        self._closed = True
        timeout_s = self.config.shutdown_timeout_s
        left = _countdown(timeout_s)
        try:
            if running := self._running():
                await asyncio.wait(running, timeout=timeout_s)
        except asyncio.CancelledError:
            left = _countdown(0.0)
            raise
        finally:
            async with contextlib.AsyncExitStack() as steps:  # a failed step does not prevent the others
                steps.callback(self._parts.free)
                steps.push_async_callback(lambda: self._parts.stack.aclose(timeout_s=left()))
                steps.callback(self._lookups.pins.close)
                for limit in self._calls.values():
                    limit.reschedule(0.0)
                for task in self._background:
                    task.cancel()
                if running := self._running():
                    await asyncio.wait(running, timeout=timeout_s)


def _log_open(
    logger: logging.Logger, config: EngineConfig, groups: Sequence[EngineGroup], stack: TierStack
) -> None:
    """Log the tiers with their content, and the namespaces by the ids that `lmcache-async inspect` shows."""
    tiers = []
    for stacked in stack.tiers:
        content = stacked.tier.statistics()
        known = ""
        if content.max_bytes is not None:  # otherwise the size of the content is unknown here
            size = f"{content.bytes / 1e9:.1f} of {content.max_bytes / 1e9:.1f} GB"
            known = f" ({content.chunks} records, {size})"
        tiers.append(f"{stacked.id}{known}")
    logger.info(
        "engine open: tiers %s; chunks of %d tokens; namespace %s",
        ", ".join(tiers),
        config.chunk_size,
        ", ".join(namespace_id(group.namespace.text) for group in groups),
    )


def _countdown(timeout_s: float) -> Callable[[], float]:
    """Return a function that gives the seconds left of `timeout_s`, by the clock of the running loop."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    return lambda: max(0.0, deadline - clock())


def _merge_stored(batches: Sequence[BatchStored], start: float, copied: float) -> StoreReport:
    """Merge the results of a store's batches; `start` and `copied` are times of `time.perf_counter`."""
    stored = tokens = 0
    dropped = Drops()
    for batch in batches:
        dropped.add_all(batch.dropped)
        causes = batch.outcomes.causes()
        written = causes.count("")
        stored += written
        tokens += sum([len(chunk.tokens) for chunk in batch.chunks])
        if written < len(causes):
            for chunk, cause in zip(batch.chunks, causes, strict=True):
                if cause != "":
                    tokens -= len(chunk.tokens)
                    dropped.add([chunk], cause or "deadline")
    return StoreReport(
        stored=stored,
        shared=sum(batch.outcomes.shared() for batch in batches),
        present=sum(batch.present for batch in batches),
        dropped=Counter(dropped),
        tokens=tokens,
        bytes=sum(batch.bytes for batch in batches),
        seconds=time.perf_counter() - start,
        copy_seconds=copied - start,
    )


def _merge_retrieved(batches: Sequence[RetrieveReport], asked_tokens: int, start: float) -> RetrieveReport:
    """Merge the results of a retrieve's batches, in prefix order; the last one may have ended the prefix."""
    by_tier: Counter[str] = Counter()
    for batch in batches:
        by_tier.update(batch.by_tier)
    return RetrieveReport(
        hit_chunks=sum(batch.hit_chunks for batch in batches),
        hit_tokens=sum(batch.hit_tokens for batch in batches),
        asked_tokens=asked_tokens,
        bytes=sum(batch.bytes for batch in batches),
        seconds=time.perf_counter() - start,
        by_tier=by_tier,
        cause=batches[-1].cause if batches else "",
    )
