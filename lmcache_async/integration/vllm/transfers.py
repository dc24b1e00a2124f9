"""The worker half's loads and stores: started from the model's thread, run on the engine's loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Protocol

from lmcache_async.integration.vllm.metadata import SKIP
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from typing import Any

    from lmcache_async.device.copier import Copier, Fence
    from lmcache_async.device.progress import LoadProgress
    from lmcache_async.integration.vllm.metadata import Job
    from lmcache_async.integration.vllm.notices import Notices
    from lmcache_async.types import BlockIds, Chunk, RequestPlan, RetrieveReport, StoreReport

logger = LimitedLogger(logging.getLogger(__name__))


class Engine(Protocol):
    """What transfers need of the cache engine."""

    @property
    def copier(self) -> Copier: ...

    async def store_chunks(self, request: StoreRequest) -> StoreReport: ...

    async def retrieve_chunks(self, request: RetrieveRequest) -> RetrieveReport: ...

    async def clear(self, *, memory_only: bool = False) -> int: ...

    def planned(self, plan: RequestPlan) -> None: ...


class Loop(Protocol):
    """What runs coroutines for another thread."""

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]: ...


class Transfers:
    """Whatever happens to a job, its end is reported once: a load's request, a store's job.

    `load`, `store` and the `take_*` methods are the model thread's and wait for nothing.
    """

    def __init__(
        self,
        engine: Engine,
        loop: Loop,
        *,
        rank: int,
        chunk_size: int,
        block_size: int,
        notices: Notices | None = None,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._rank = rank
        self._notices = notices
        self._sizes = (chunk_size, block_size)
        self._epoch = 0
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._copied: dict[int, int] = {}
        self._unshared: dict[int, int] = {}
        self._loading: set[int] = set()  # jobs whose end is not reported
        self._storing: set[int] = set()  # jobs whose blocks are not reported as free

    def load(self, jobs: Sequence[Job], progress: Mapping[int, LoadProgress] | None = None) -> None:
        """Start to load, behind what the model's thread has asked of the device.

        Args:
            progress: By job, for those that somebody waits for.
        """
        if not jobs:
            return
        waited = progress or {}
        self._expect(jobs)
        try:
            started = self._loop.submit(self._load_all(jobs, self._engine.copier.fence(), waited))
        except Exception as error:  # a border: these loads are lost, vLLM computes instead
            logger.log(logging.ERROR, repr(error), "loads could not be started: %r", error, exc_info=True)
            self._loads_lost(jobs, waited)
        else:
            started.add_done_callback(lambda _: self._loads_lost(jobs, waited))

    def store(self, jobs: Sequence[Job]) -> None:
        """Start to store what the forward passes so far have computed."""
        if not jobs:
            return
        with self._lock:
            self._storing.update(job.job_id for job in jobs)
        try:
            started = self._loop.submit(self._store_all(jobs, self._engine.copier.fence()))
        except Exception as error:  # a border: these stores are dropped
            logger.log(logging.ERROR, repr(error), "stores could not be started: %r", error, exc_info=True)
            self._copies_ended(jobs)
        else:
            started.add_done_callback(lambda _: self._copies_ended(jobs))

    def tell(self, plans: Sequence[RequestPlan]) -> None:
        """Where requests that were admitted get their prompts from, for who looks at the engine."""
        if not plans:
            return
        try:
            self._loop.submit(self._tell(plans))
        except Exception as error:  # a border: what nobody sees harms nobody
            logger.log(logging.ERROR, repr(error), "plans could not be told: %r", error, exc_info=True)

    def lose_loads(self, jobs: Iterable[Job]) -> None:
        """Report loads that were not started as ended with every block failed."""
        for job in jobs:
            self._expect([job])
            self._load_ended(job, job.touched_blocks())

    def give_up(self, job: Job) -> None:
        """Report a layer-wise load that was started as failed in every block, whatever becomes of it."""
        self._load_ended(job, ())
        with self._lock:
            self._failed_blocks.update(job.touched_blocks())

    def drop_stores(self, jobs: Iterable[Job]) -> None:
        """Report the blocks of stores that were not started as not needed any more."""
        for job in jobs:
            with self._lock:
                self._storing.add(job.job_id)
            self._copy_ended(job)

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not; known no later than their request's end."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_copied(self) -> dict[int, int]:
        """Stores that no longer read their blocks, as a count by job."""
        with self._lock:
            copied, self._copied = self._copied, {}
        return copied

    def take_unshared(self) -> dict[int, int]:
        """Stores to be handed over that tiers have answered, with how many chunks no shared tier has taken."""
        with self._lock:
            unshared, self._unshared = self._unshared, {}
        return unshared

    async def clear(self, epoch: int, memory_only: bool) -> int:
        """Forget what is cached; stores planned before `epoch` that come later are dropped."""
        self._epoch = max(self._epoch, epoch)
        return await self._engine.clear(memory_only=memory_only)

    async def _tell(self, plans: Sequence[RequestPlan]) -> None:
        for plan in plans:
            self._engine.planned(plan)

    async def _load_all(
        self, jobs: Sequence[Job], fence: Fence | None, progress: Mapping[int, LoadProgress]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(self._load(job, fence, progress.get(job.job_id)))

    async def _store_all(self, jobs: Sequence[Job], fence: Fence | None) -> None:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(self._store(job, fence))

    async def _load(self, job: Job, fence: Fence | None, progress: LoadProgress | None) -> None:
        failed = job.touched_blocks()  # until the engine says otherwise
        try:
            if not job.keys:
                return
            parts = self._parts(job)
            report = await self._engine.retrieve_chunks(
                RetrieveRequest(
                    request_id=job.request_id,
                    chunks=tuple(chunk for chunk, _ in parts),
                    rows=tuple(rows for _, rows in parts),
                    request_namespace=job.request_namespace,
                    fence=fence,
                    progress=progress,
                )
            )
            missing = parts[report.hit_chunks :]
            failed = [block for _, rows in missing for block in rows.tolist() if block != SKIP]
        except Exception as error:  # a border: the load failed, vLLM computes instead
            logger.log(
                logging.ERROR, repr(error), "load of %s failed: %r", job.request_id, error, exc_info=True
            )
        finally:
            self._load_ended(job, failed)
            if progress is not None:
                progress.end()

    async def _store(self, job: Job, fence: Fence | None) -> None:
        copied = _Once(lambda: self._copy_ended(job))
        unshared: int | None = job.num_chunks
        try:
            if job.epoch < self._epoch:
                return
            parts = self._parts(job)
            report = await self._engine.store_chunks(
                StoreRequest(
                    request_id=job.request_id,
                    chunks=tuple(chunk for chunk, _ in parts),
                    rows=tuple(rows for _, rows in parts),
                    request_namespace=job.request_namespace,
                    fence=fence,
                    on_copied=copied,
                )
            )
            unshared = len(parts) - report.present - report.shared
            if not unshared and not report.shared:
                unshared = None  # written before; that tells nothing of how the tiers are now
        except Exception as error:  # a border: the store is dropped
            logger.log(
                logging.ERROR, repr(error), "store of %s failed: %r", job.request_id, error, exc_info=True
            )
        finally:
            copied()
            if job.hand_over and unshared is not None:
                with self._lock:
                    self._unshared[job.job_id] = unshared

    def _parts(self, job: Job) -> list[tuple[Chunk, BlockIds]]:
        parts = list(job.chunks(self._rank, *self._sizes))
        if self._notices is not None:
            self._notices.know(job, [chunk for chunk, _ in parts], self._rank)
        return parts

    def _load_ended(self, job: Job, failed_blocks: Iterable[int]) -> None:
        with self._lock:
            if job.job_id not in self._loading:
                return  # reported already: its blocks may be another request's by now
            self._loading.discard(job.job_id)
            if not job.layerwise:  # vLLM waits for no word of a layer-wise load
                self._finished.add(job.request_id)
            self._failed_blocks.update(failed_blocks)

    def _expect(self, jobs: Iterable[Job]) -> None:
        with self._lock:
            self._loading.update(job.job_id for job in jobs)

    def _loads_lost(self, jobs: Iterable[Job], progress: Mapping[int, LoadProgress]) -> None:
        """No load of these runs any more: report what has not been reported, and let nobody wait for it."""
        for job in jobs:
            if job.job_id in self._loading:
                self._load_ended(job, job.touched_blocks())
        for waited in progress.values():
            waited.end()

    def _copies_ended(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._copy_ended(job)

    def _copy_ended(self, job: Job) -> None:
        with self._lock:
            if job.job_id in self._storing:
                self._storing.discard(job.job_id)
                self._copied[job.job_id] = 1


class _Once:
    """Calls a function the first time it is called."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()
