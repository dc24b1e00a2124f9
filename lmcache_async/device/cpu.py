"""The copier of a paged cache in host memory (vLLM on CPU, and tests everywhere)."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_async.device.copier import CheckedJob, CopyJob, Fence, Payload, check_jobs, wait_all
from lmcache_async.device.parts import Part, PartQueue
from lmcache_async.device.plan import (
    Int64s,
    Piece,
    PlaneTable,
    coarsen,
    cut,
    plane_steps,
    runs,
    segments,
    whole_planes,
)
from lmcache_async.errors import EngineClosedError
from lmcache_async.memory.threads import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.device.layout import KVLayout
    from lmcache_async.device.planes import Plane
    from lmcache_async.device.progress import LoadProgress

PART_BYTES = 16 << 20
"""Of a load that is waited for plane by plane: what a thread takes at a time, one or two milliseconds."""

KEPT_CORES = 1
"""The model's: its thread copies what it waits for itself. All others may have a copying thread beside it."""

ALONE_S = 0.5
"""After so long a load is copied also without the thread that should wait for it."""

MIN_THREAD_BYTES = 1 << 20
"""Below this a second thread costs more than it saves: a hop is some 50 microseconds, 1 MiB takes 100."""

LARGE_ROW_BYTES = 32 << 10
"""From here on rows copied one by one run at memmove's speed, so longer runs gain nothing."""

LONG_RUN_BYTES = 128 << 10
"""From here on a run is worth a call of its own from Python (half a microsecond), which gives up the lock."""

UNLOCKED_ITEMS = 512
"""NumPy assigns up to 500 items by index without giving up the interpreter lock: more are as good as free."""

MIN_ITEM_BYTES = 4 << 10
"""Items smaller than this are not copied at memmove's speed."""

BOUNCE_BYTES = 256 << 10
"""Rows at odd strides pass through a temporary of this size: it stays in the second-level cache."""


class CpuCopier:
    """Copies on threads of its own; the interpreter lock is free while bytes move.

    A batch takes one hop to each thread. On cancellation parts that no thread has begun are withdrawn.
    """

    def __init__(self, layout: KVLayout, *, threads: int = 2) -> None:
        self.layout = layout
        self._threads = threads
        self._helpers = max(0, min(threads, len(os.sched_getaffinity(0)) - KEPT_CORES))
        self._table = PlaneTable(layout.planes)
        self._groups = _group(layout)
        self._largest = max(plane.row_bytes for plane in layout.planes)
        self._executor = WorkerPool(threads, thread_name_prefix="lmcache-async-copy")
        self._closed = False

    def fence(self) -> Fence | None:
        return None

    async def gather(self, jobs: Sequence[CopyJob], fence: Fence | None = None) -> None:
        del fence
        checked = check_jobs(self.layout, jobs, writes_payload=True)
        self._check_open()
        await self._run(checked, to_host=True)

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
        if self._closed:
            raise EngineClosedError("the copier is closed")

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=True)

    async def _run(self, jobs: Sequence[CheckedJob], *, to_host: bool) -> None:
        total = sum(job.payload.nbytes for job in jobs)
        share = max(-(-total // self._threads) + self._largest, MIN_THREAD_BYTES)
        parts = cut(self._table, [len(job.rows) for job in jobs], max_bytes=share)
        work = [self._executor.submit(self._copy, jobs, part, to_host=to_host) for part in parts]
        await wait_all(
            [asyncio.wrap_future(future) for future in work],
            on_cancel=lambda: [future.cancel() for future in work],
        )

    async def _scatter_in_order(self, jobs: Sequence[CheckedJob], progress: LoadProgress) -> None:
        """Write all rows of the first planes, then of the next ones, together with the thread that waits."""
        num_rows = [len(job.rows) for job in jobs]
        parts: list[Part] = []
        for planes in plane_steps(self._table, PART_BYTES // max(sum(num_rows), 1)):
            step = whole_planes(self._table, num_rows, planes)
            if sum(piece.nbytes for piece in step) < 2 * PART_BYTES:
                works = [step]
            else:
                works = cut(self._table, num_rows, max_bytes=PART_BYTES, planes=planes)
            parts += [
                Part(planes[0], functools.partial(self._copy, jobs, work, to_host=False)) for work in works
            ]
        queue = PartQueue(parts, self.layout.num_planes, progress.advance)
        del parts
        progress.accept_help(queue.work)
        for _ in range(self._helpers):
            self._executor.submit(queue.work)
        late = asyncio.get_running_loop().call_later(ALONE_S, self._copy_alone, queue)
        try:
            await wait_all([asyncio.wrap_future(queue.done)], on_cancel=queue.withdraw)
        finally:
            late.cancel()

    def _copy_alone(self, queue: PartQueue) -> None:
        """Nobody has waited for this load so far."""
        if self._closed:  # then whoever scattered is late, and its copy with it
            queue.withdraw()
        else:
            self._executor.submit(queue.work)

    def _copy(self, jobs: Sequence[CheckedJob], part: Sequence[Piece], *, to_host: bool) -> None:
        for piece in part:
            job = jobs[piece.job]
            offset = piece.offset
            for group in self._groups:
                first, last = group.first * len(job.rows), group.last * len(job.rows)
                start, stop = max(piece.start, first), min(piece.stop, last)
                if start < stop:
                    end = offset + (stop - start) * group.row_bytes
                    where = group.table.locate(job.rows, start - first, stop - first)
                    spans = segments(where) if job.has_skips else ((0, len(where)),)
                    for low, high in spans:
                        payload = job.payload[
                            offset + low * group.row_bytes : offset + high * group.row_bytes
                        ]
                        group.copy(where[low:high], payload, to_host=to_host)
                    offset = end


class Group(Protocol):
    """Planes `first` to `last` (exclusive), all with rows of one size, copied in the same way."""

    first: int
    last: int
    row_bytes: int
    table: PlaneTable

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool) -> None:
        """Copy the rows at `where` (as the group's table gives them) to or from consecutive payload rows."""


class AlignedGroup:
    """Planes of one storage whose rows all start at multiples of the row size, but for one offset.

    Their storage is then one array of rows, and one native call moves rows of all planes.
    """

    def __init__(self, memory: Payload, planes: Sequence[Plane], first: int, last: int) -> None:
        members = planes[first:last]
        self.first, self.last, self.row_bytes = first, last, members[0].row_bytes
        shift = members[0].base % self.row_bytes
        self.table = PlaneTable(members, origins=shift, unit=self.row_bytes)
        self._memory = memory[shift:]

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool) -> None:
        size = self.row_bytes
        memory = self._memory
        if size >= LONG_RUN_BYTES:
            _copy_rows(memory, where * size, payload, size, to_host=to_host)
            return
        if size < LARGE_ROW_BYTES:
            units, factor, offset = coarsen(where)
            if size * factor < LARGE_ROW_BYTES:
                first, lengths = runs(where)
                if len(where) * size >= LONG_RUN_BYTES * len(first):
                    starts, places, sizes = where[first] * size, first * size, lengths * size
                    _copy_spans(memory, starts, payload, places, sizes, to_host=to_host)
                    return
            where, size, memory = units, size * factor, memory[offset * size :]
        if not to_host:
            where, size = divide(where, size)
        rows = memory[: len(memory) // size * size].view(f"V{size}")
        if to_host:
            # mode="clip": the default would go through a buffer; rows are within bounds (check_jobs).
            np.take(rows, where, out=payload.view(f"V{size}"), mode="clip")
        else:
            rows[where] = payload.view(f"V{size}")


class StridedGroup:
    """Planes of one storage and row size at any strides: rows are at byte offsets."""

    def __init__(self, memory: Payload, planes: Sequence[Plane], first: int, last: int) -> None:
        self.first, self.last, self.row_bytes = first, last, planes[first].row_bytes
        self.table = PlaneTable(planes[first:last])
        self._memory = memory
        # A view with a row at every byte, so that a row's offset is its index.
        places = len(memory) - self.row_bytes + 1
        self._rows: npt.NDArray[np.void] = np.ndarray((places,), f"V{self.row_bytes}", memory, 0, (1,))

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool) -> None:
        size = self.row_bytes
        if size >= LARGE_ROW_BYTES:
            _copy_rows(self._memory, where, payload, size, to_host=to_host)
            return
        rows = payload.view(f"V{size}")
        if not to_host:
            self._rows[where] = rows
            return
        step = max(BOUNCE_BYTES // size, 1)
        for start in range(0, len(where), step):
            rows[start : start + step] = self._rows[where[start : start + step]]


def divide(where: Int64s, size: int) -> tuple[Int64s, int]:
    """Name the same bytes as more and smaller items, so that assigning to them gives up the lock.

    Returns:
        Indices of items, and their size in bytes: `size` divided by a power of two.
    """
    factor = 1
    while len(where) * factor < UNLOCKED_ITEMS and size % 2 == 0 and size // 2 >= MIN_ITEM_BYTES:
        size //= 2
        factor *= 2
    if factor == 1:
        return where, size
    return (where[:, None] * factor + np.arange(factor)).ravel(), size


def _copy_rows(memory: Payload, starts: Int64s, payload: Payload, size: int, *, to_host: bool) -> None:
    """Copy rows of one size, one by one."""
    places = np.arange(0, len(payload), size)
    _copy_spans(memory, starts, payload, places, np.full_like(places, size), to_host=to_host)


def _copy_spans(
    memory: Payload, starts: Int64s, payload: Payload, places: Int64s, sizes: Int64s, *, to_host: bool
) -> None:
    """Copy spans one by one: from Python, half a microsecond each, the lock free for each."""
    for start, place, size in zip(starts.tolist(), places.tolist(), sizes.tolist(), strict=True):
        if to_host:
            payload[place : place + size] = memory[start : start + size]
        else:
            memory[start : start + size] = payload[place : place + size]


def _group(layout: KVLayout) -> list[Group]:
    """The layout's planes in groups, as long as their order allows."""
    memories = [storage.numpy() for storage in layout.storages]
    groups: list[Group] = []
    first = 0
    for form, members in itertools.groupby(layout.planes, _form):
        last = first + len(list(members))
        kind = StridedGroup if form.shift is None else AlignedGroup
        groups.append(kind(memories[form.storage], layout.planes, first, last))
        first = last
    return groups


class _Form(NamedTuple):
    """What the planes of one group have in common; `shift` is None at odd strides."""

    storage: int
    row_bytes: int
    shift: int | None


def _form(plane: Plane) -> _Form:
    size = plane.row_bytes
    odd = plane.block_stride % size or plane.row_stride % size
    return _Form(plane.storage, size, None if odd else plane.base % size)
