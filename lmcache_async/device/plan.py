"""Partition of a batch of copies into pieces, and their positions in cache and payload. Pure functions.

An entry is one row of one plane. The entries of a job are numbered `[plane][row]`, as in its payload.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lmcache_async.device.layout import KVLayout
from lmcache_async.device.planes import Int64s, Plane
from lmcache_async.types import BlockIds

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Piece:
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
        origins: Byte offset of position 0, one for all planes or one for each plane.
        unit: Bytes of one position. It must divide all strides, and all bases minus their origins.
    """

    def __init__(self, planes: Sequence[Plane], *, origins: Sequence[int] | int = 0, unit: int = 1) -> None:
        self.row_bytes = np.array([plane.row_bytes for plane in planes], np.int64)
        # As lists, because NumPy takes a microsecond for a single number.
        self._sizes = [plane.row_bytes for plane in planes]
        self.starts = [0, *itertools.accumulate(self._sizes)]  # bytes of a row before each plane
        bases = np.array([plane.base for plane in planes], np.int64) - np.asarray(origins, np.int64)
        self._bases = bases // unit
        self._block_strides = np.array([plane.rows.block_stride for plane in planes], np.int64) // unit
        self._row_strides = np.array([plane.rows.row_stride for plane in planes], np.int64) // unit
        self._rows_per_block = np.array([plane.rows.rows_per_block for plane in planes], np.int64)
        self._uniform = bool((self._rows_per_block == 1).all())

    def locate(self, rows: BlockIds, start: int, stop: int) -> Int64s:
        """Return the positions of entries `start` to `stop` (exclusive), -1 for those of skipped rows."""
        first, last = start // len(rows), -(-stop // len(rows))
        part = slice(first, last)
        if self._uniform:
            where = self._bases[part, None] + rows * self._block_strides[part, None]
        else:
            blocks, offsets = np.divmod(rows, self._rows_per_block[part, None])
            where = self._bases[part, None] + blocks * self._block_strides[part, None]
            where += offsets * self._row_strides[part, None]
        skipped = rows < 0
        if skipped.any():
            where[:, skipped] = -1
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


class PlaneGroup:
    """Planes `first` to `last` (exclusive), of one storage and one row size, and the positions of their rows."""

    def __init__(self, planes: Sequence[Plane], first: int, *, unit: int = 1) -> None:
        self.first = first
        self.last = first + len(planes)
        self.row_bytes = planes[0].row_bytes
        self.table = PlaneTable(planes, unit=unit)


GroupT = TypeVar("GroupT", bound=PlaneGroup)


def split(layout: KVLayout, make: Callable[[int, Sequence[Plane], int], GroupT]) -> list[GroupT]:
    """Group the planes of a layout. `make` gets the storage, its planes and the number of the first one."""
    groups: list[GroupT] = []
    key = operator.attrgetter("storage", "row_bytes")
    for (storage, _), members in itertools.groupby(layout.planes, key):
        groups.append(make(storage, list(members), groups[-1].last if groups else 0))
    return groups


def locate_by_group(
    groups: Sequence[PlaneGroup], rows: BlockIds, piece: Piece
) -> Iterator[tuple[int, Int64s, int]]:
    """Yield the index of each group in a piece, the positions of its entries, and the bytes before them."""
    offset = 0
    for index, group in enumerate(groups):
        first, last = group.first * len(rows), group.last * len(rows)
        start, stop = max(piece.start, first), min(piece.stop, last)
        if start < stop:
            yield index, group.table.locate(rows, start - first, stop - first), offset
            offset += (stop - start) * group.row_bytes


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
