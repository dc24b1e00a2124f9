"""Copier of a paged cache in host memory (vLLM on CPU, and tests on any machine)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Iterable, Sequence

from lmcache_async.device.copier import CheckedJob, CopyJob, Fence, check_jobs
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.plan import (
    Piece,
    PlaneTable,
    cut,
    group_planes,
    locate_by_group,
    plane_steps,
    whole_planes,
)
from lmcache_async.device.progress import CopyPart, LoadProgress, PartQueue, off_core
from lmcache_async.device.rows import MIN_DIGEST_BYTES, cache_memory, can_digest, copy_rows
from lmcache_async.errors import EngineClosedError
from lmcache_async.memory.copies import STREAM_BYTES, CopyQueue, RowCopy, compiled
from lmcache_async.memory.threads import WorkerPool, in_threads, run_shielded

PART_BYTES = 16 << 20
"""Size of the parts of a layer-wise load; a thread copies one in one or two milliseconds."""

RESERVED_CORES = 1
"""Cores without a copy thread: the model thread copies on its own core while it waits for a load."""

UNAWAITED_S = 0.5
"""Seconds after which a thread of the pool copies all of a layer-wise load, because no thread waits for it."""

MIN_THREAD_BYTES = 1 << 20
"""Minimum bytes per thread. A handover to a thread takes about 50 microseconds, a copy of 1 MiB about 100."""


class CopyThreads:
    """Threads for one or several copiers.

    Attributes:
        pool: For copies by Python: all without the compiled module, otherwise checksums of stores and layer-wise loads.
        queue: For all other copies, with as many other threads; None without the compiled module.
    """

    def __init__(self, threads: int) -> None:
        self.num = threads
        self.closed = False
        self.pool = WorkerPool(threads, thread_name_prefix="lmcache-async-copy")
        self.queue = CopyQueue(threads, "lmcache-async-rows") if compiled is not None else None

    def close(self) -> None:
        """Wait for all copies and end the threads. Idempotent."""
        self.closed = True
        self.pool.shutdown(wait=True)
        if self.queue is not None:
            self.queue.close()


class CpuCopier:
    """Copier with threads. The GIL is released during copies.

    On cancellation, copies that no thread has begun are withdrawn. Threads that several copiers use are ended by the
    first `close`.
    """

    def __init__(self, layout: KVLayout, *, threads: CopyThreads | int = 2) -> None:
        self.layout = layout
        self._memory, origins = cache_memory(layout)
        self._threads = CopyThreads(threads) if isinstance(threads, int) else threads
        self._helpers = max(0, min(self._threads.num, len(os.sched_getaffinity(0)) - RESERVED_CORES))
        self._table = PlaneTable(layout.planes, origins=origins)
        self._groups = group_planes(layout.planes, by_storage=False)
        self._can_digest = can_digest(layout)
        self._largest = max(plane.row_bytes for plane in layout.planes)

    def fence(self) -> Fence | None:
        return None

    async def wait_fence(self, fence: Fence) -> None:
        del fence  # there is none: submitted work is complete

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        del fence
        checked = check_jobs(self.layout, jobs, writes_payload=True)
        self._check_open()
        if digest and self._can_digest and not any(map(_cannot_digest, checked)):
            return await self._gather_digesting(checked)
        await self._run(checked, to_host=True)
        return None

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        del fence
        checked = check_jobs(self.layout, jobs, writes_payload=False)
        self._check_open()
        if progress is None:
            await self._run(checked, to_host=False)
        else:
            await self._scatter_in_order(checked, progress)

    def _check_open(self) -> None:
        if self._threads.closed:
            raise _closed()

    def close(self) -> None:
        self._threads.close()

    async def _run(self, jobs: Sequence[CheckedJob], *, to_host: bool) -> None:
        total = sum(job.payload.nbytes for job in jobs)
        share = max(-(-total // self._threads.num) + self._largest, MIN_THREAD_BYTES)
        parts = cut(self._table, [len(job.rows) for job in jobs], max_bytes=share)
        stream = total >= STREAM_BYTES
        if (queue := self._threads.queue) is not None:
            rows = [piece for part in parts for piece in self._rows(jobs, part)]
            await queue.copy(rows, to_payload=to_host, stream=stream)
            return
        copy = functools.partial(self._copy, jobs, to_host=to_host, stream=stream)
        await in_threads(self._threads.pool, [functools.partial(copy, part) for part in parts])

    async def _gather_digesting(self, jobs: Sequence[CheckedJob]) -> list[bytes]:
        """Gather each payload on one thread, from start to end: a digest takes bytes in order."""
        total = sum(job.payload.nbytes for job in jobs)
        count = min(len(jobs), self._threads.num, max(total // MIN_THREAD_BYTES, 1))
        shares = [range(len(jobs) * i // count, len(jobs) * (i + 1) // count) for i in range(count)]
        copy = functools.partial(self._copy, jobs, to_host=True, stream=total >= STREAM_BYTES, digest=True)

        def gather(index: int) -> bytes:
            job = jobs[index]
            whole = Piece(index, 0, len(job.rows) * self.layout.num_planes, 0, job.payload.nbytes)
            digest = copy([whole])
            assert digest is not None  # `can_digest`
            return digest

        digests: list[list[bytes]] = await in_threads(
            self._threads.pool, [functools.partial(list, map(gather, share)) for share in shares]
        )
        return [digest for each in digests for digest in each]

    async def _scatter_in_order(self, jobs: Sequence[CheckedJob], progress: LoadProgress) -> None:
        """Write all rows of the first planes, then of the next planes; the waiting thread copies too."""
        num_rows = [len(job.rows) for job in jobs]
        stream = sum(job.payload.nbytes for job in jobs) >= STREAM_BYTES
        copy = functools.partial(self._copy, jobs, to_host=False, stream=stream)
        parts: list[CopyPart] = []
        for planes in plane_steps(self._table, PART_BYTES // max(sum(num_rows), 1)):
            step = whole_planes(self._table, num_rows, planes)
            works: Iterable[list[Piece]] = [step]
            if sum(piece.nbytes for piece in step) >= 2 * PART_BYTES:
                works = cut(self._table, num_rows, max_bytes=PART_BYTES, planes=planes)
            parts += [CopyPart(planes[0], functools.partial(copy, work)) for work in works]
        queue = PartQueue(parts, self.layout.num_planes, progress.advance)
        del parts, copy
        progress.set_worker(queue.work)
        with contextlib.suppress(RuntimeError):  # no thread can be started; the waiting thread copies
            for _ in range(self._helpers):
                self._threads.pool.submit(_work_off_core, queue, progress.core)
        late = asyncio.get_running_loop().call_later(UNAWAITED_S, self._copy_unawaited, queue)
        try:
            await run_shielded(asyncio.wrap_future(queue.done), on_cancel=queue.withdraw)
        finally:
            late.cancel()
            error = queue.take_error()
        try:
            if error is not None:
                raise error
        finally:
            del error  # breaks the reference cycle of the error and this frame, which would keep the payloads

    def _copy_unawaited(self, queue: PartQueue) -> None:
        """Copy a load that no thread has waited for."""
        if self._threads.closed:
            queue.withdraw(_closed())
            return
        try:
            self._threads.pool.submit(queue.work)
        except RuntimeError:  # no thread can be started
            queue.work()

    def _copy(
        self,
        jobs: Sequence[CheckedJob],
        part: Sequence[Piece],
        *,
        to_host: bool,
        stream: bool,
        digest: bool = False,
    ) -> bytes | None:
        return copy_rows(self._rows(jobs, part), to_payload=to_host, stream=stream, digest=digest)

    def _rows(self, jobs: Sequence[CheckedJob], part: Sequence[Piece]) -> list[RowCopy]:
        """Return one `RowCopy` for each group of planes in each piece."""
        rows: list[RowCopy] = []
        for piece in part:
            job = jobs[piece.job]
            for index, where, offset in locate_by_group(self._table, self._groups, job, piece):
                size, start = self._groups[index].row_bytes, piece.offset + offset
                rows.append((self._memory, where, job.payload[start : start + len(where) * size], size))
        return rows


def _closed() -> EngineClosedError:
    return EngineClosedError("the copier is closed")


def _cannot_digest(job: CheckedJob) -> bool:
    return job.has_skips or job.payload.nbytes < MIN_DIGEST_BYTES


def _work_off_core(queue: PartQueue, core: int | None) -> None:
    """Copy parts on other cores than `core`, where the waiting thread runs."""
    with off_core(core):
        queue.work()
