"""Worker side of the connector: the cache engine of one rank, its event loop, its lookup server, loads and stores."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import reduce
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from vllm.utils.network_utils import get_ip

from lmcache_async.config import EngineConfig
from lmcache_async.device.copier import Fence
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.progress import LoadProgress
from lmcache_async.engine.builder import EngineGroup
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import ConfigError, EngineClosedError, LMCacheAsyncError, MissingDependencyError
from lmcache_async.hashing import Namespace, hash_key_id
from lmcache_async.integration.vllm.config import (
    backend_reason,
    group_namespace,
    head_shards,
    namespace_of,
    shard_config,
    shard_namespace,
    uses_tcp,
)
from lmcache_async.integration.vllm.events import ChunkEvents, MemoryChanges
from lmcache_async.integration.vllm.groups import HeadShard, KVGroups
from lmcache_async.integration.vllm.jobs import SKIP, Job, JobPart, StepMetadata, WorkerReport
from lmcache_async.integration.vllm.lookup_server import (
    PROTOCOL,
    Identity,
    LookupServer,
    TCPAddress,
    socket_path,
)
from lmcache_async.integration.vllm.versions import data_parallel_index
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.samples import Samples
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.pipeline.report import merge_retrieves, merge_stores
from lmcache_async.types import BlockIds, Chunk, RequestPlan, RetrieveReport, StoreReport

T = TypeVar("T")

logger = LimitedLogger(logging.getLogger(__name__))

BEGIN_S = 0.5
"""Time within which a layer-wise load must start to copy, because the whole batch waits for it. A load from host memory
takes this long only if the event loop or the copy threads are blocked."""

IDLE_S = 0.1
"""Longest wait for loads from host memory in a step of an idle engine. Loads that take longer continue after the step.
A request that arrives meanwhile waits for the end of the step."""

STATS_INTERVAL_S = 0.5
"""Shortest time between two collections of the engine's metrics."""


class Loop(Protocol):
    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]: ...


class Transfers:
    """Loads and stores of one rank, started by the model's thread and run on the engine's loop.

    The end of each job is reported exactly once, also after a failure: of a load by request id, of a store by job id.
    Layer-wise loads end with their step, so only their failures are reported. `load`, `store` and the `take_*` methods
    are called by the model's thread and do not block.

    With a single group of full attention, failures are reported by block, and vLLM computes from the first failed block
    on. Otherwise they are reported by request, because a block id does not identify its group, and vLLM computes the
    whole request.

    Attributes:
        layerwise: The loads that the forward pass of their own step awaits.
    """

    def __init__(
        self,
        engine: CacheEngine,
        loop: Loop,
        *,
        rank: int,
        chunk_size: int,
        groups: KVGroups,
        layout: KVLayout,
        events: ChunkEvents | None = None,
        memory: MemoryChanges | None = None,
    ) -> None:
        self.layerwise = LayerwiseLoads(self.report_failed, layout.layer_ends, layout.num_planes)
        self._engine = engine
        self._loop = loop
        self._rank = rank
        self._events = events
        self._memory = memory
        self._chunk_size = chunk_size
        self._groups = groups
        self._epoch = 0
        self._lock = threading.Condition()
        self._finished: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._copied: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._unshared: dict[int, int] = {}
        self._unanswered: set[int] = set()  # jobs to be handed over whose result is not reported yet
        self._loading: set[int] = set()  # jobs whose end is not reported yet
        # Jobs whose blocks are not reported as copied, and the number of their parts that are left.
        self._storing: dict[int, int] = {}

    def load(self, jobs: Sequence[Job]) -> None:
        """Start loads, ordered after the work that the model's thread has queued on the device."""
        if not jobs:
            return
        waited: dict[int, LoadProgress] = {}

        def submit() -> Future[Any]:
            waited.update(self.layerwise.start([job for job in jobs if job.layerwise]))
            fence = self._engine.copier.fence()
            return self._loop.submit(_run_all(self._load(job, fence, waited.get(job.job_id)) for job in jobs))

        with self._lock:
            self._loading.update(job.job_id for job in jobs)
        self._start("loads", submit, lambda: self._loads_lost(jobs, waited))

    def store(self, jobs: Sequence[Job]) -> None:
        """Start stores, ordered after the forward passes that were launched so far."""
        if not jobs:
            return

        def submit() -> Future[Any]:
            fence = self._engine.copier.fence()
            return self._loop.submit(_run_all(self._store(job, fence) for job in jobs))

        with self._lock:
            self._storing.update((job.job_id, len(job.parts)) for job in jobs)
            self._unanswered.update(job.job_id for job in jobs if job.hand_over)
        self._start("stores", submit, lambda: self._stores_lost(jobs))

    def report_plans(self, plans: Sequence[RequestPlan]) -> None:
        """Pass load decisions of admitted requests to the engine's status."""
        if plans:
            self._start(
                "the report of load decisions",
                lambda: self._loop.submit(self._report_plans(plans)),
                lambda: None,
            )

    def _start(self, what: str, submit: Callable[[], Future[Any]], lost: Callable[[], None]) -> None:
        """Submit work to the loop. Call `lost` when the work has ended, or if it cannot be started."""
        try:
            started = submit()
        except Exception:  # vLLM computes tokens that are not loaded; a lost store is a later miss
            logger.exception("%s could not be started", what)
            lost()
        else:
            started.add_done_callback(lambda _: lost())

    def report_failed(self, job: Job) -> None:
        """Report a layer-wise load that was started as failed in every block, whatever its outcome."""
        self._load_ended(job, ())
        with self._lock:
            self._failed_blocks.update(job.touched_blocks())

    def wait(self, jobs: Collection[int], timeout_s: float) -> None:
        """Block until the loads of these jobs have ended, or the timeout expires."""
        with self._lock:
            self._lock.wait_for(lambda: self._loading.isdisjoint(jobs), timeout_s)

    def take_finished(self) -> set[str]:
        """Return the ids of requests whose loads have ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed_requests(self) -> set[str]:
        """Return the ids of requests whose loads have failed. A failure is known no later than the end of its load."""
        with self._lock:
            failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_failed_blocks(self) -> set[int]:
        """Return the ids of blocks that were not loaded. A failure is known no later than the end of its load."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self, step: int) -> WorkerReport:
        """Return the progress of stores, and the chunk events, since the last call."""
        events = self._events.take() if self._events is not None else ()
        change = self._memory.take() if self._memory is not None else None
        memory = {self._rank: change} if change is not None else {}
        with self._lock:
            report = WorkerReport(self._copied, self._answered, self._unshared, events, memory, step)
            self._copied, self._answered, self._unshared = {}, {}, {}
        return report

    async def clear(self, epoch: int, memory_only: bool) -> int:
        """Clear the cache. Stores planned before `epoch` that arrive later are dropped."""
        self._epoch = max(self._epoch, epoch)
        return await self._engine.clear(memory_only=memory_only)

    async def _report_plans(self, plans: Sequence[RequestPlan]) -> None:
        for plan in plans:
            self._engine.planned(plan)

    async def _load(self, job: Job, fence: Fence | None, progress: LoadProgress | None) -> None:
        missing = job.touched_blocks()  # until the engine reports otherwise
        reports: list[RetrieveReport] = []
        try:
            # The largest part first: it is copied while the others are planned.
            parts = sorted(job.parts, key=lambda part: len(part.tokens), reverse=True)
            loaded = await _run_all(self._load_part(job, part, fence, progress, reports) for part in parts)
            missing = [block for blocks in loaded for block in blocks]
        except Exception:  # the load fails, and vLLM computes instead
            logger.exception("the load of request %s failed; its tokens are computed", job.request_id)
        finally:
            self._load_ended(job, missing)
            if progress is not None:
                progress.end()
        if reports:
            self._engine.report_retrieved(job.request_id, merge_retrieves(reports))

    async def _load_part(
        self,
        job: Job,
        part: JobPart,
        fence: Fence | None,
        progress: LoadProgress | None,
        reports: list[RetrieveReport],
    ) -> list[int]:
        """Load a part and return its blocks that were not loaded. The report of the engine is added to `reports`."""
        if not part.keys:
            return part.touched_blocks()
        chunks, rows = self._chunks(job, part)
        # Leave out leading chunks that vLLM has itself, because `hit_chunks` does not count them.
        first = next((index for index, ids in enumerate(rows) if (ids != SKIP).any()), len(rows))
        chunks, rows = chunks[first:], rows[first:]
        if not chunks:
            return []
        report = await self._engine.retrieve_chunks(
            RetrieveRequest(
                request_id=job.request_id,
                group=part.group,
                chunks=chunks,
                rows=rows,
                request_namespace=job.request_namespace,
                fence=fence,
                reported=False,
                awaited=job.awaited,
                progress=progress,
            )
        )
        reports.append(report)
        return [block for ids in rows[report.hit_chunks :] for block in ids.tolist() if block != SKIP]

    async def _store(self, job: Job, fence: Fence | None) -> None:
        unshared: int | None = job.num_chunks  # None if the result does not show whether tiers accept writes
        try:
            if job.epoch < self._epoch:
                unshared = None
                return
            reports = await _run_all(self._store_part(job, part, fence) for part in job.parts)
            report = merge_stores(reports)
            unshared = job.num_chunks - report.present - report.shared
            if job.epoch < self._epoch or not (unshared or report.shared):
                unshared = None  # cleared meanwhile, or all chunks were stored before
            self._engine.report_stored(job.request_id, report)
        except Exception:  # the store is dropped
            logger.exception("chunks of request %s are not stored", job.request_id)
        finally:
            self._copies_ended([job])
            self._answer(job, unshared)

    async def _store_part(self, job: Job, part: JobPart, fence: Fence | None) -> StoreReport:
        # `clear` may have been called since the job began, and waits only for stores that have begun.
        if job.epoch < self._epoch:
            return StoreReport()
        chunks, rows = self._chunks(job, part)
        return await self._engine.store_chunks(
            StoreRequest(
                request_id=job.request_id,
                group=part.group,
                chunks=chunks,
                rows=rows,
                request_namespace=job.request_namespace,
                fence=fence,
                reported=False,
                on_copied=lambda: self._part_copied(job),
            )
        )

    def _chunks(self, job: Job, part: JobPart) -> tuple[tuple[Chunk, ...], tuple[BlockIds, ...]]:
        """Return the chunks of a part with their block ids. Announce chunks of the leading group for KV events."""
        block_size = self._groups[part.group].block_size
        pairs = list(part.chunks(self._rank, self._chunk_size, block_size))
        chunks = tuple(chunk for chunk, _ in pairs)
        if self._events is not None and self._groups.full and part.group == self._groups.leading.index:
            self._events.announce(
                chunks, part.parents[self._rank] if part.parents else b"", job.event_lora_name
            )
        return chunks, tuple(rows for _, rows in pairs)

    def _load_ended(self, job: Job, failed_blocks: Iterable[int]) -> None:
        with self._lock:
            if job.job_id not in self._loading:
                return  # reported already; its blocks may belong to another request by now
            self._loading.discard(job.job_id)
            if not job.layerwise:  # vLLM does not wait for layer-wise loads
                self._finished.add(job.request_id)
            failed = set(failed_blocks)
            if self._groups.is_one_full:
                self._failed_blocks |= failed
            elif failed:
                self._failed_requests.add(job.request_id)
            self._lock.notify_all()

    def _loads_lost(self, jobs: Iterable[Job], progress: Mapping[int, LoadProgress]) -> None:
        """Report the loads of these jobs that were not reported, and end their progress. None of them runs any more."""
        for job in jobs:
            if job.job_id in self._loading:
                self._load_ended(job, job.touched_blocks())
        for waited in progress.values():
            waited.end()

    def _stores_lost(self, jobs: Iterable[Job]) -> None:
        """Report the stores of these jobs that were not reported. None of them runs any more."""
        self._copies_ended(jobs)
        for job in jobs:
            self._answer(job, job.num_chunks)

    def _answer(self, job: Job, unshared: int | None) -> None:
        """Report the result of a store that is handed over. Each job is reported once."""
        with self._lock:
            if job.job_id not in self._unanswered:
                return
            self._unanswered.discard(job.job_id)
            self._answered[job.job_id] = 1
            if unshared is not None:
                self._unshared[job.job_id] = unshared

    def _part_copied(self, job: Job) -> None:
        with self._lock:
            left = self._storing.get(job.job_id, 0) - 1
            if left > 0:
                self._storing[job.job_id] = left
                return
        self._copies_ended([job])

    def _copies_ended(self, jobs: Iterable[Job]) -> None:
        """Record that these stores no longer read their blocks. Each job is reported once."""
        with self._lock:
            for job in jobs:
                if self._storing.pop(job.job_id, None) is not None:
                    self._copied[job.job_id] = 1


async def _run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. If one fails, the others are cancelled."""
    coroutines = list(works)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                tasks.append(group.create_task(coroutine))
                await asyncio.sleep(0)  # its copy begins before the next one is planned
    finally:
        for coroutine in coroutines[len(tasks) :]:
            coroutine.close()
    return [task.result() for task in tasks]


class LayerwiseLoads:
    """Loads that the forward pass of their own step awaits layer by layer. Used on the model's thread.

    Args:
        report_failed: Reports a load as failed.
        layer_ends: By layer name, the number of leading planes that contain the whole layer. A layer without an entry
            waits for all planes.
    """

    def __init__(
        self, report_failed: Callable[[Job], None], layer_ends: Mapping[str, int], num_planes: int
    ) -> None:
        self._report_failed = report_failed
        self._ends = layer_ends
        self._num_planes = num_planes
        self._jobs: list[tuple[Job, LoadProgress]] = []
        self._layers_left: set[str] = set()
        self._deadline = 0.0

    def start(self, jobs: Sequence[Job]) -> Mapping[int, LoadProgress]:
        """Register the loads of a step before its forward pass. Return their progress by job id."""
        if not jobs:
            return {}
        self.settle()
        self._jobs = [(job, LoadProgress(self._num_planes)) for job in jobs]
        self._layers_left = set(self._ends)
        self._deadline = time.monotonic() + BEGIN_S
        return {job.job_id: progress for job, progress in self._jobs}

    def wait(self, layer_name: str) -> None:
        """Block before a layer's attention until its part of each load is copied, or the load has failed."""
        if not self._jobs:
            return
        planes = self._ends.get(layer_name)
        for _, progress in self._jobs:
            progress.wait(self._num_planes if planes is None else planes, deadline=self._deadline)
        if planes is not None:
            self._layers_left.discard(layer_name)
        elif len(self._layers_left) == len(self._ends):  # the first layer has waited for all planes
            self._layers_left.clear()

    def settle(self) -> None:
        """Report loads as failed if the forward pass did not wait for all layers, or if their outcome is unknown.

        Called after the forward pass. When it returns, no load of the step writes to its blocks any more.
        """
        if not self._jobs:
            return
        jobs, self._jobs = self._jobs, []
        for job, progress in jobs:
            awaited = False
            try:
                awaited = self._was_awaited(progress)
            except Exception:  # vLLM computes tokens that are not known to be loaded
                logger.exception("the outcome of a load is unknown; its tokens are computed")
            if not awaited:
                self._report_failed(job)

    def _was_awaited(self, progress: LoadProgress) -> bool:
        """Return whether the forward pass waited for every layer, and the outcome of the load is known."""
        if not progress.wait_ended(deadline=max(self._deadline, time.monotonic() + BEGIN_S)):
            logger.report("late", "a load made no progress for %.1f s; its tokens are computed", BEGIN_S)
            return False
        if self._layers_left:
            logger.report(
                "layers",
                "vLLM did not wait for layer %s (%d layers in all); set vllm.layerwise_load to never",
                min(self._layers_left),
                len(self._layers_left),
            )
            return False
        return True


class StatsFeed:
    """Metrics of an engine, collected on its loop and taken by the model's thread without waiting.

    The loop collects them after a store or retrieve has ended, at most once per `STATS_INTERVAL_S`. Only `take` may be
    called by another thread.
    """

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._lock = threading.Lock()
        self._taken = Samples()
        self._ready: tuple[Samples, Samples] | None = None  # all samples, and the changes since `_taken`
        engine.metrics.changed = self._changed
        self._changed()  # exported zeros make the first increase visible

    def take(self) -> Samples:
        """Return the counts since the last call; empty if they are not available without waiting."""
        if self._ready is None or not self._lock.acquire(blocking=False):
            return Samples()
        try:
            return self._take_ready()
        finally:
            self._lock.release()

    def close(self) -> None:
        self._engine.metrics.changed = lambda: None
        if self._timer is not None:
            self._timer.cancel()

    def _take_ready(self) -> Samples:
        ready, self._ready = self._ready, None
        if ready is None:  # nothing has changed since the last call
            return Samples()
        self._taken, new = ready
        return new

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._due, self._loop.time()), self._collect)

    def _collect(self) -> None:
        self._timer = None
        self._due = self._loop.time() + STATS_INTERVAL_S
        try:
            samples = self._engine.metrics.read()
        except Exception as error:  # noqa: BLE001  # of a user's tier or layer
            logger.report("statistics", "metrics cannot be collected: %s: %s", type(error).__name__, error)
            return
        with self._lock:
            new = samples.since(self._taken)
            self._ready = (samples, new) if new else None


OpenEngine: TypeAlias = Callable[..., AbstractAsyncContextManager[Any]]
"""`CacheEngine.open` or a replacement."""


class RankEngine:
    """The cache engine of one rank, or of one shard of its KV heads, with its loop and its lookup server.

    Only `register`, `open` and `close` block.

    Attributes:
        rank: Rank of this worker; with shards, the number of this shard among all shards. Index of its keys in a job.
        namespace: Namespace of the rank, without its layout, once the KV cache is registered.
        address: Path of the lookup server's socket, or the host where it listens over TCP.
        engine: The engine, once it is open.
        server: The lookup server, once the engine is open.
        loads_early: Whether loads may start before the forward pass of their step; set when the engine is opened.

    Args:
        kv_events: Whether vLLM publishes KV events. Only the first rank reports the events of its tiers.
        replica: Number of the data-parallel replica.
        shard: The shard of the rank's KV heads that is loaded and stored; None for all heads, in one record.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        groups: KVGroups,
        address: Path | str,
        open_engine: OpenEngine = CacheEngine.open,
        kv_events: bool = False,
        replica: int = 0,
        shard: HeadShard | None = None,
    ) -> None:
        self.config = config
        self._shard = shard
        self.namespace: Namespace | None = None
        self._replica = replica
        self.rank = rank
        self._groups = groups
        self.address = address
        self.server: LookupServer | None = None
        self._open_engine = open_engine
        self._loop: LoopThread | None = None
        self._serving: concurrent.futures.Future[None] | None = None
        self._stop = asyncio.Event()
        self._close_by = math.inf
        self.engine: CacheEngine | None = None
        self._transfers: Transfers | None = None
        self._feed: StatsFeed | None = None
        self._events = ChunkEvents(config.chunk_size) if kv_events and rank == 0 else None
        self._memory = MemoryChanges()
        self.loads_early = False

    @classmethod
    def of_vllm(
        cls,
        vllm_config: Any,
        config: EngineConfig,
        groups: KVGroups,
        *,
        open_engine: OpenEngine = CacheEngine.open,
        shard: HeadShard | None = None,
    ) -> Self:
        rank = vllm_config.parallel_config.rank
        if shard is not None:
            config = shard_config(config, shard.shards_of_rank)
            rank = rank * shard.shards_of_rank + shard.position
        events = vllm_config.kv_events_config
        return cls(
            config,
            rank=rank,
            groups=groups,
            address=get_ip()
            if uses_tcp(config, vllm_config)
            else socket_path(config.vllm.socket_dir, vllm_config.kv_transfer_config.engine_id, rank),
            kv_events=events is not None and events.enable_kv_cache_events,
            replica=data_parallel_index(vllm_config),
            open_engine=open_engine,
            shard=shard,
        )

    def register(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        kv_caches: Mapping[str, Any],
        namespace: Namespace | None = None,
    ) -> bool:
        """Open the engine over vLLM's KV cache. Return False if that fails; all lookups are then misses.

        Args:
            namespace: The namespace of the rank, if it is known; otherwise the weights are read.

        Raises:
            ConfigError: The configuration is invalid, so vLLM must not start with it.
            MissingDependencyError: A tier or stage needs a package.
        """
        if reason := backend_reason(vllm_config, kv_cache_config):
            logging.getLogger(__name__).warning("LMCacheAsyncConnector is off: %s", reason)
            return False
        try:
            self.namespace = namespace or namespace_of(vllm_config, kv_cache_config, self.config, "")
            self.open(*self._engine_groups(kv_cache_config, kv_caches, self.namespace))
        except (ConfigError, MissingDependencyError):
            raise
        except LMCacheAsyncError as error:
            logging.getLogger(__name__).error("LMCacheAsyncConnector is off: %s", error)  # noqa: TRY400 - no bug
            return False
        except Exception:
            logging.getLogger(__name__).exception(
                "LMCacheAsyncConnector is off: the engine could not be opened"
            )
            return False
        return True

    def _engine_groups(
        self, kv_cache_config: Any, kv_caches: Mapping[str, Any], namespace: Namespace
    ) -> list[EngineGroup]:
        """Layout and namespace of each KV group."""
        if self._shard is not None:
            namespace = shard_namespace(namespace, self._shard)
            kv_caches = shard_views(kv_cache_config, kv_caches, self._shard)
        made = []
        for group in self._groups:
            own = kv_caches
            if len(self._groups) > 1:
                own = {name: kv_caches[name] for name in group.layers if name in kv_caches}
            layout = KVLayout.from_block_views(
                own,
                num_blocks=kv_cache_config.num_blocks,
                block_size=group.block_size,
                kind="pages" if group.state else "heads",
                by_head=self._shard is not None,
            )
            made.append(EngineGroup(layout, group_namespace(namespace, group, self._groups, layout.text)))
        return made

    def open(self, *groups: EngineGroup) -> None:
        """Open the engine over the registered KV cache of each KV group, and start the lookup server.

        Raises:
            ConfigError: The engine cannot be opened as configured.
        """
        # On a CPU a forward pass has ended when its call returns, and new blocks are zeroed before the pass, so a load
        # may start with the step. On a GPU a load is ordered after the forward pass that was just launched.
        self.loads_early = groups[0].layout.device.type == "cpu"
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = LoopThread("lmcache-async")
        serving = self._loop.submit(self._serve(self._loop, groups, opened))
        try:
            concurrent.futures.wait([opened, serving], return_when=concurrent.futures.FIRST_COMPLETED)
            if not opened.done():
                serving.result()
        except BaseException:
            self._loop.close()
            raise
        self._serving = serving

    def attach(self, engine: CacheEngine, loop: Loop, *groups: EngineGroup) -> LookupServer:
        """Use an open engine for the loads and stores of the following steps. Return its lookup server, not started."""
        self.engine = engine
        self._transfers = transfers = Transfers(
            engine,
            loop,
            rank=self.rank,
            chunk_size=self.config.chunk_size,
            groups=self._groups,
            layout=groups[0].layout,
            events=self._events,
            memory=self._memory,
        )
        self._memory.tier = engine.watched_memory()
        self.server = LookupServer(
            engine, self._identity(groups), self.address, clear=transfers.clear, memory=engine.memory_lookup
        )
        return self.server

    @property
    def tcp_address(self) -> TCPAddress | None:
        """Address of the lookup server over TCP; None if it listens on a Unix socket, or is not open."""
        return self.server.tcp_address if self.server is not None else None

    def take_stats(self) -> Samples:
        """get_kv_connector_stats: return the changes of the engine's metrics since the last call."""
        return self._feed.take() if self._feed is not None else Samples()

    def stop(self) -> None:
        """Start to close the engine, without waiting."""
        if self._loop is not None:
            self._close_by = min(self._close_by, time.monotonic() + self.config.shutdown_timeout_s + 0.5)
            with contextlib.suppress(EngineClosedError):
                self._loop.call_soon(self._stop.set)

    def close(self) -> None:
        """Close the engine and the loop. Blocks until `shutdown_timeout_s` after `stop`, and some seconds if the loop hangs."""
        if self._loop is None or self._serving is None:
            return
        self.stop()
        loop, self._loop = self._loop, None
        try:
            self._serving.result(max(0.0, self._close_by - time.monotonic()))
        except (TimeoutError, concurrent.futures.CancelledError, EngineClosedError):
            logger.report(
                "close",
                "the engine did not close within shutdown_timeout_s of %g s; queued writes are lost",
                self.config.shutdown_timeout_s,
            )
        finally:
            loop.close(0.5)

    @property
    def transfers(self) -> Transfers:
        if self._transfers is None:
            raise RuntimeError("the KV cache was never registered")
        return self._transfers

    async def _serve(
        self, loop: LoopThread, groups: Sequence[EngineGroup], opened: concurrent.futures.Future[None]
    ) -> None:
        """Keep engine and server open until stopped. One task opens and closes them."""
        opening = self._open_engine(
            self.config,
            layout=groups[0].layout,
            namespace=groups[0].namespace,
            watcher=self._events,
            memory_watcher=self._memory,
            replica=self._replica,
            more_groups=groups[1:],
        )
        async with opening as engine:
            server = self.attach(engine, loop, *groups)
            await server.start()
            try:
                self._feed = StatsFeed(engine)
                opened.set_result(None)
                await self._stop.wait()
            finally:
                if self._feed is not None:
                    self._feed.close()
                await server.aclose()

    def _identity(self, groups: Sequence[EngineGroup]) -> Identity:
        namespace = groups[self._groups.leading.index].namespace
        return Identity(
            protocol=PROTOCOL,
            root=namespace.root(),
            algorithm=self.config.hash_algorithm,
            chunk_size=self.config.chunk_size,
            block_size=self._groups.block_size,
            hash_key_id=hash_key_id(namespace.hash_key),
            group_roots=tuple(group.namespace.root() for group in groups),
        )


class WorkerConnector:
    """The connector in a vLLM worker process.

    A rank has one engine, or one for each shard of its KV heads. Each engine has its own
    lookup server and records, like a rank of a vLLM instance with as many ranks as shards. A load has ended when it
    has ended in all engines.
    """

    def __init__(self, engines: Sequence[RankEngine]) -> None:
        self.engines = engines
        # By request id, the number of engines in which its load has ended, until it has ended in all.
        self._ended: Counter[str] = Counter()
        self._loads: Sequence[Job] = ()
        self._stores: Sequence[Job] = ()
        self._step = 0

    @classmethod
    def of_vllm(cls, vllm_config: Any, kv_cache_config: Any, config: EngineConfig, groups: KVGroups) -> Self:
        """Create the connector of this rank. Its engines are opened when the KV cache is registered.

        Raises:
            ConfigError: The KV heads cannot be divided as configured.
        """
        shards = head_shards(config, vllm_config, kv_cache_config) or (None,)
        return cls([RankEngine.of_vllm(vllm_config, config, groups, shard=shard) for shard in shards])

    def register(self, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> bool:
        """Open the engines over vLLM's KV cache. Return False if that fails; all lookups are then misses.

        Raises:
            ConfigError: The configuration is invalid, so vLLM must not start with it.
            MissingDependencyError: A tier or stage needs a package.
        """
        opened: list[RankEngine] = []
        try:
            for engine in self.engines:
                namespace = opened[0].namespace if opened else None
                if not engine.register(vllm_config, kv_cache_config, kv_caches, namespace):
                    break
                opened.append(engine)
        finally:
            if len(opened) < len(self.engines):
                _close_all(opened)
        return len(opened) == len(self.engines)

    def begin_step(self, metadata: StepMetadata) -> None:
        """bind_connector_metadata."""
        self._loads, self._stores, self._step = metadata.loads, metadata.stores, metadata.step
        for engine in self.engines:
            engine.transfers.report_plans(metadata.plans)
        if self.engines[0].loads_early:
            self.start_loads()

    def start_loads(self) -> None:
        """start_load_kv.

        In a step that computes nothing, wait for loads from host memory. Without this, the thread would compete with
        the event loop for the GIL, and the end of a load would be reported to vLLM one step later.
        """
        loads, self._loads = self._loads, ()
        awaited = [job.job_id for job in loads if job.awaited]
        for engine in self.engines:
            engine.transfers.load(loads)
        deadline = time.monotonic() + IDLE_S
        for engine in self.engines if awaited else ():
            engine.transfers.wait(awaited, max(0.0, deadline - time.monotonic()))

    def wait_for_layer(self, layer_name: str) -> None:
        """wait_for_layer_load: wait for the layer's part of this step's layer-wise loads."""
        for engine in self.engines:
            engine.transfers.layerwise.wait(layer_name)

    def start_stores(self) -> None:
        """wait_for_save: start the stores, after the forward pass was launched. Does not block."""
        stores, self._stores = self._stores, ()
        for engine in self.engines:
            engine.transfers.store(stores)

    def take_finished(self) -> set[str]:
        """Return the ids of requests whose loads have ended in all engines since the last call."""
        for engine in self.engines:
            self._ended.update(engine.transfers.take_finished())
        finished = {name for name, count in self._ended.items() if count == len(self.engines)}
        for name in finished:
            del self._ended[name]
        return finished

    def take_failed_requests(self) -> set[str]:
        return {name for engine in self.engines for name in engine.transfers.take_failed_requests()}

    def take_failed_blocks(self) -> set[int]:
        """Return the ids of blocks that were not loaded. Called after the forward pass."""
        failed: set[int] = set()
        for engine in self.engines:
            engine.transfers.layerwise.settle()
            failed |= engine.transfers.take_failed_blocks()
        return failed

    def take_report(self) -> WorkerReport | None:
        step, self._step = self._step, 0
        report = reduce(
            WorkerReport.aggregate, [engine.transfers.take_report(step) for engine in self.engines]
        )
        content = (report.copied, report.answered, report.events, report.memory, step)
        return report if any(content) else None

    def close(self) -> None:
        """Close the engines at the same time; see `RankEngine.close`."""
        _close_all(self.engines)


def _close_all(engines: Sequence[RankEngine]) -> None:
    """Close engines at the same time. An error of one does not prevent the others from being closed."""
    with contextlib.ExitStack() as stack:
        for engine in engines:
            engine.stop()
            stack.callback(engine.close)


def shard_views(kv_cache_config: Any, kv_caches: Mapping[str, Any], shard: HeadShard) -> dict[str, Any]:
    """Return the KV heads of a shard, as views of the KV caches of its rank by layer name.

    Layers that share the KV of another layer are left out.

    Raises:
        ConfigError: A KV cache is not one tensor of whole heads.
    """
    views = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            if name not in kv_caches:
                continue
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            shape = tuple(getattr(kv_caches[name], "shape", ()))
            content = spec.head_size + spec.head_size_v
            if len(shape) != 4 or (shape[1], shape[3]) != (spec.num_kv_heads, content):
                raise ConfigError(
                    f"vllm.kv_head_shards is {shard.shards}, but the KV cache of {name} has the shape {shape},"
                    f" which is not that of {spec.num_kv_heads} heads of {content} elements; remove the key"
                )
            views[name] = kv_caches[name].narrow(1, *shard.of_heads(spec.num_kv_heads))
    return views
