"""Partition of a batch of copies into pieces, and their positions in cache and payload. Pure functions.

An entry is one row of one plane. The entries of a job are numbered `[plane][row]`, as in its payload.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmcache_async.device.copier import CheckedJob
from lmcache_async.device.planes import Int64s, Plane

UNBOUNDED = 1 << 62


class Piece(NamedTuple):
    """Entries of one job, consecutive in its payload."""

    job: int
    start: int
    stop: int
    offset: int  # bytes before the piece in the payload
    nbytes: int


class PlaneTable:
    """Planes as arrays, for computing the positions of entries.

    Args:
        planes: Planes in payload order.
        origins: Position of the storage of each plane, or one number for all planes. Positions of entries include it.
    """

    def __init__(self, planes: Sequence[Plane], *, origins: Sequence[int] | int = 0) -> None:
        self.row_bytes = np.array([plane.row_bytes for plane in planes], np.int64)
        # As lists, because NumPy takes a microsecond for a single number.
        self._sizes = [plane.row_bytes for plane in planes]
        self.starts = [0, *itertools.accumulate(self._sizes)]  # bytes of a row before each plane
        # Columns, for a result with a row for each plane.
        bases = np.array([plane.base for plane in planes], np.int64) + np.asarray(origins, np.int64)
        self._bases = bases[:, None]
        self._block_strides = np.array([[plane.rows.block_stride] for plane in planes], np.int64)
        self._row_strides = np.array([[plane.rows.row_stride] for plane in planes], np.int64)
        self._rows_per_block = np.array([[plane.rows.rows_per_block] for plane in planes], np.int64)
        self._uniform = bool((self._rows_per_block == 1).all())

    def locate(self, job: CheckedJob, start: int, stop: int) -> Int64s:
        """Return the byte positions of entries `start` to `stop` (exclusive), -1 for those of skipped rows."""
        rows = job.rows
        first, last = start // len(rows), -(-stop // len(rows))
        part = slice(first, last)
        if self._uniform:
            where = rows * self._block_strides[part]
        else:
            blocks, offsets = np.divmod(rows, self._rows_per_block[part])
            where = blocks * self._block_strides[part]
            where += offsets * self._row_strides[part]
        where += self._bases[part]
        if job.has_skips:
            where[:, rows < 0] = -1
        return where.reshape(-1)[start - first * len(rows) : stop - first * len(rows)]

    def payload_offset(self, num_rows: int, entry: int) -> int:
        """Return the bytes before `entry` in the payload of a job of `num_rows` rows."""
        plane, row = divmod(entry, num_rows)
        if plane == len(self._sizes):
            return self.starts[-1] * num_rows
        return self.starts[plane] * num_rows + row * self._sizes[plane]

    def entry_at(self, num_rows: int, offset: int) -> int:
        """Return the entry of payload byte `offset`; at the end of the payload, the number of entries."""
        plane = bisect.bisect_right(self.starts, offset // num_rows) - 1
        if plane == len(self._sizes):
            return plane * num_rows
        return plane * num_rows + (offset - self.starts[plane] * num_rows) // self._sizes[plane]


class PlaneGroup(NamedTuple):
    """Planes `first` to `last` (exclusive) of a layout, of one row size."""

    first: int
    last: int
    row_bytes: int


def group_planes(planes: Sequence[Plane], *, by_storage: bool) -> list[PlaneGroup]:
    """Group consecutive planes of one row size, and with `by_storage` of one storage."""
    groups: list[PlaneGroup] = []
    for _, members in itertools.groupby(
        planes, lambda plane: (plane.row_bytes, by_storage and plane.storage)
    ):
        first, some = groups[-1].last if groups else 0, list(members)
        groups.append(PlaneGroup(first, first + len(some), some[0].row_bytes))
    return groups


def locate_by_group(
    table: PlaneTable, groups: Sequence[PlaneGroup], job: CheckedJob, piece: Piece
) -> Iterator[tuple[int, Int64s, int]]:
    """Yield the index of each group in a piece, the positions of its entries, and the bytes before them."""
    count, offset = len(job.rows), 0
    positions = table.locate(job, piece.start, piece.stop)
    for index, (first, last, row_bytes) in enumerate(groups):
        start, stop = max(piece.start, first * count), min(piece.stop, last * count)
        if start < stop:
            yield index, positions[start - piece.start : stop - piece.start], offset
            offset += (stop - start) * row_bytes


def cut(
    table: PlaneTable,
    num_rows: Iterable[int],
    *,
    max_bytes: int,
    max_entries: int = UNBOUNDED,
    planes: tuple[int, int] | None = None,
) -> Iterator[list[Piece]]:
    """Cut a batch into parts of at most `max_bytes` and `max_entries`, in the order of the jobs.

    Each part is filled before the next one begins. An entry is never split: one that exceeds `max_bytes` is a
    part by itself. Only `planes` (first, last exclusive) are cut, if given. A part is cut when it is requested, so
    that the first one of a large batch can be copied while the others are cut.
    """
    part: list[Piece] = []
    room, entries = max_bytes, max_entries
    low, high = planes or (0, len(table.row_bytes))
    for job, count in enumerate(num_rows):
        start, last = low * count, high * count
        offset = table.payload_offset(count, start) if count else 0
        while start < last:
            stop = min(
                table.entry_at(count, min(offset + room, table.payload_offset(count, last))), start + entries
            )
            if stop == start:
                if part:
                    yield part
                    part, room, entries = [], max_bytes, max_entries
                    continue
                stop = start + 1
            end = table.payload_offset(count, stop)
            part.append(Piece(job, start, stop, offset, end - offset))
            room, entries = max(room - (end - offset), 0), entries - (stop - start)
            start, offset = stop, end
    if part:
        yield part


def whole_planes(table: PlaneTable, num_rows: Sequence[int], planes: tuple[int, int]) -> list[Piece]:
    """Return all rows of the planes (first, last exclusive), one piece for each job that has rows."""
    low, high = planes
    before, inside = table.starts[low], table.starts[high] - table.starts[low]
    return [
        Piece(job, low * count, high * count, before * count, inside * count)
        for job, count in enumerate(num_rows)
        if count
    ]


def plane_steps(table: PlaneTable, step_bytes: int) -> list[tuple[int, int]]:
    """Divide all planes into ranges (first, last exclusive) of at least `step_bytes` per row, or one smaller range."""
    ends = [0]
    for plane in range(1, len(table.row_bytes)):
        rest = table.starts[-1] - table.starts[plane]
        if min(table.starts[plane] - table.starts[ends[-1]], rest) >= step_bytes:
            ends.append(plane)
    return list(itertools.pairwise([*ends, len(table.row_bytes)]))


def segments(where: Int64s) -> list[tuple[int, int]]:
    """Return the spans (start, stop) of entries that are not at -1."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], where >= 0, [False])).astype(np.int8)))
    return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
