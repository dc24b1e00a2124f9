"""Copies between the rows of a paged cache in host memory and payloads.

They use the compiled module if it is installed, else NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.device.copier import CheckedJob, Payload
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.plan import Int64s, PlaneGroup, segments, split
from lmcache_async.device.planes import Plane
from lmcache_async.memory.copies import Rows, compiled

LARGE_ROW_BYTES = 32 << 10
"""Row size from which row-by-row copies by NumPy reach the speed of memmove. Each one takes half a microsecond
of overhead and releases the GIL.
"""

LONG_RUN_BYTES = 128 << 10
"""Average size of runs of consecutive rows from which NumPy copies each run by one call."""

UNLOCKED_ITEMS = 512
"""Rows of a call with which NumPy releases the GIL. With up to 500 rows it does not."""

STEP_BYTES = 256 << 10
"""Bytes of one call that keeps the GIL, or that reads through a temporary array, which fits in the L2 cache."""

DIGEST_UNIT = 64
"""The row size must be a multiple of this number of bytes for a checksum during the copy."""

MIN_DIGEST_BYTES = 256
"""Minimum bytes of a payload for a checksum during the copy."""


class RowGroup(PlaneGroup):
    """Planes of one storage and one row size in host memory. Rows are addressed by byte offset."""

    def __init__(self, memory: Payload, planes: Sequence[Plane], first: int) -> None:
        super().__init__(planes, first)
        self.memory = memory
        strides = [stride for plane in planes for stride in (plane.rows.block_stride, plane.rows.row_stride)]
        shifts = {plane.base % self.row_bytes for plane in planes}
        aligned = len(shifts) == 1 and not any(stride % self.row_bytes for stride in strides)
        self._shift = shifts.pop() if aligned else None
        """Remainder of the offset of every row modulo the row size, if it is the same for all rows; else None."""

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool) -> None:
        """Copy rows of the cache to or from consecutive rows of the payload, by NumPy.

        Args:
            where: Byte offsets of the rows. Rows at -1 are skipped.
        """
        size = self.row_bytes
        for start, stop in segments(where):
            self._copy_present(where[start:stop], payload[start * size : stop * size], to_host=to_host)

    def _copy_present(self, where: Int64s, payload: Payload, *, to_host: bool) -> None:
        size = self.row_bytes
        first = np.concatenate(([0], np.flatnonzero(np.diff(where) != size) + 1))
        if size >= LARGE_ROW_BYTES or len(payload) >= LONG_RUN_BYTES * len(first):
            self._copy_runs(where[first], first * size, payload, to_host=to_host)
        else:
            self._copy_small(where, payload, to_host=to_host)

    def _copy_runs(self, where: Int64s, places: Int64s, payload: Payload, *, to_host: bool) -> None:
        """Copy runs of consecutive rows from the offsets `where` to `places` in the payload, or back."""
        memory, stops = self.memory, [*places[1:].tolist(), len(payload)]
        for start, place, stop in zip(where.tolist(), places.tolist(), stops, strict=True):
            run = slice(start, start + stop - place)
            if to_host:
                payload[place:stop] = memory[run]
            else:
                memory[run] = payload[place:stop]

    def _copy_small(self, where: Int64s, payload: Payload, *, to_host: bool) -> None:
        size, item = self.row_bytes, f"V{self.row_bytes}"
        rows = payload.view(item)
        if to_host and self._shift is not None:
            memory = self.memory[self._shift :]
            memory = memory[: len(memory) // size * size].view(item)
            # The default mode would use a temporary array. Rows are within bounds (check_jobs).
            np.take(memory, where // size, out=rows, mode="clip")
            return
        # A view with a row at every byte: the index of a row is its offset.
        anywhere: npt.NDArray[np.void] = np.ndarray(
            (len(self.memory) - size + 1,), item, self.memory, 0, (1,)
        )
        step = max(STEP_BYTES // size, 1)
        if not to_host and len(where) >= UNLOCKED_ITEMS:
            step = len(where)
        for start in range(0, len(where), step):
            part = slice(start, start + step)
            if to_host:
                rows[part] = anywhere[where[part]]
            else:
                anywhere[where[part]] = rows[part]


RowPiece: TypeAlias = "tuple[RowGroup, Int64s, Payload]"
"""Rows to copy: their group, the byte offset of each, or -1 to skip it, and their consecutive places in a payload."""


def compiled_pieces(pieces: Iterable[RowPiece]) -> list[Rows]:
    """Return the arguments of the compiled module for these pieces."""
    return [(group.memory, where, payload, group.row_bytes) for group, where, payload in pieces]


def copy_rows(pieces: Sequence[RowPiece], *, to_host: bool, stream: bool) -> None:
    """Copy rows of the cache to or from payloads.

    The compiled module copies all pieces in one call, because a thread that returns to Python has to wait for the GIL.

    Args:
        stream: The batch is larger than the CPU caches: bypass them if supported.
    """
    if compiled is not None:
        compiled.copy_all(compiled_pieces(pieces), to_host, stream)
        return
    for group, where, payload in pieces:
        group.copy(where, payload, to_host=to_host)


def group_planes(layout: KVLayout) -> list[RowGroup]:
    """Group consecutive planes of one storage and one row size."""
    memories = [storage.numpy() for storage in layout.storages]
    return split(layout, lambda storage, planes, first: RowGroup(memories[storage], planes, first))


def can_digest(groups: Sequence[RowGroup]) -> bool:
    """Return whether `gather_with_digest` supports the rows of a layout."""
    return compiled is not None and not any(group.row_bytes % DIGEST_UNIT for group in groups)


def gather_with_digest(groups: Sequence[RowGroup], job: CheckedJob, *, stream: bool) -> bytes:
    """Fill the payload of a job without skipped rows and return its xxh3_128, so that it is read only once."""
    assert compiled is not None
    state = compiled.start_digest(job.payload.nbytes)
    start = 0
    for group in groups:
        where = group.table.locate(job.rows, 0, (group.last - group.first) * len(job.rows))
        stop = start + len(where) * group.row_bytes
        compiled.copy(group.memory, where, job.payload[start:stop], group.row_bytes, True, stream, state)
        start = stop
    digest: bytes = compiled.finish_digest(state)
    return digest
