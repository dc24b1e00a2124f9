"""How a batch is cut into pieces and which bytes each piece names. Pure.

An entry is one row of one plane; the entries of a job are numbered `[plane][row]`, as its payload is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.device.planes import Plane
    from lmcache_async.types import BlockIds

Int64s: TypeAlias = npt.NDArray[np.int64]


UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries `start` to `stop` of job number `job`: payload bytes `offset` to `offset + nbytes`."""

    job: int
    start: int
    stop: int
    offset: int
    nbytes: int


class PlaneTable:
    """The planes as arrays: where entries start, in units of `unit` bytes from `origins`.

    `unit` must divide all strides and all bases less their origins.
    """

    def __init__(self, planes: Sequence[Plane], *, origins: Sequence[int] | int = 0, unit: int = 1) -> None:
        self.row_bytes = np.array([plane.row_bytes for plane in planes], np.int64)
        self.starts = np.concatenate(([0], np.cumsum(self.row_bytes)))
        bases = np.array([plane.base for plane in planes], np.int64) - np.asarray(origins, np.int64)
        self._bases = bases // unit
        self._block_strides = np.array([plane.block_stride for plane in planes], np.int64) // unit
        self._row_strides = np.array([plane.row_stride for plane in planes], np.int64) // unit
        self._rows_per_block = np.array([plane.rows_per_block for plane in planes], np.int64)
        self._uniform = bool((self._rows_per_block == 1).all())

    def locate(self, rows: BlockIds, start: int, stop: int) -> Int64s:
        """Where entries `start` to `stop` begin; -1 for those of skipped rows."""
        first, last = start // len(rows), -(-stop // len(rows))
        part = slice(first, last)
        if self._uniform:
            where = self._bases[part, None] + rows * self._block_strides[part, None]
        else:
            blocks, offsets = np.divmod(rows, self._rows_per_block[part, None])
            where = self._bases[part, None] + blocks * self._block_strides[part, None]
            where += offsets * self._row_strides[part, None]
        where[:, rows < 0] = -1
        return where.reshape(-1)[start - first * len(rows) : stop - first * len(rows)]

    def payload_offset(self, num_rows: int, entry: int) -> int:
        """Bytes before `entry` in the payload of a job of `num_rows` rows."""
        plane, row = divmod(entry, num_rows)
        if plane == len(self.row_bytes):
            return int(self.starts[-1]) * num_rows
        return int(self.starts[plane]) * num_rows + row * int(self.row_bytes[plane])

    def entry_at(self, num_rows: int, offset: int) -> int:
        """The entry that payload byte `offset` belongs to; one past the last at the payload's end."""
        plane = int(np.searchsorted(self.starts, offset // num_rows, side="right")) - 1
        if plane == len(self.row_bytes):
            return plane * num_rows
        return plane * num_rows + (offset - int(self.starts[plane]) * num_rows) // int(self.row_bytes[plane])


def cut(
    table: PlaneTable,
    num_rows: Sequence[int],
    *,
    max_bytes: int,
    max_entries: int | None = None,
    planes: tuple[int, int] | None = None,
) -> list[list[Piece]]:
    """Cut a batch into parts of at most `max_bytes` and `max_entries`; jobs in order, none torn needlessly.

    An entry is never torn: one that is larger makes a part of its own.

    Args:
        planes: The first plane and the one behind the last; None for all.
    """
    parts: list[list[Piece]] = []
    room, entries = 0, 0
    low, high = planes or (0, len(table.row_bytes))
    for job, count in enumerate(num_rows):
        start, last = low * count, high * count
        offset = table.payload_offset(count, start) if count else 0
        while start < last:
            stop = min(
                table.entry_at(count, min(offset + room, table.payload_offset(count, last))), start + entries
            )
            if stop == start:
                fresh = not parts or bool(parts[-1])
                if fresh:
                    parts.append([])
                    room, entries = max_bytes, max_entries or UNBOUNDED
                    continue
                stop = start + 1
            end = table.payload_offset(count, stop)
            parts[-1].append(Piece(job, start, stop, offset, end - offset))
            room, entries = max(room - (end - offset), 0), entries - (stop - start)
            start, offset = stop, end
    return parts


def whole_planes(table: PlaneTable, num_rows: Sequence[int], planes: tuple[int, int]) -> list[Piece]:
    """All rows of these planes, one piece for each job that has any."""
    low, high = planes
    before, inside = int(table.starts[low]), int(table.starts[high] - table.starts[low])
    return [
        Piece(job, low * count, high * count, before * count, inside * count)
        for job, count in enumerate(num_rows)
        if count
    ]


def plane_steps(table: PlaneTable, step_bytes: int | None) -> list[tuple[int, int]]:
    """All planes in consecutive ranges of at least `step_bytes` a row; one range for None."""
    ends = [0]
    if step_bytes is not None:
        for plane in range(1, len(table.row_bytes)):
            rest = table.starts[-1] - table.starts[plane]
            if min(table.starts[plane] - table.starts[ends[-1]], rest) >= step_bytes:
                ends.append(plane)
    return list(pairwise([*ends, len(table.row_bytes)]))


def runs(where: Int64s) -> tuple[Int64s, Int64s]:
    """Maximal runs of entries that follow each other in the cache: their first indices and their lengths.

    No entry may be at -1.
    """
    first = np.concatenate(([0], np.flatnonzero(np.diff(where) != 1) + 1))
    return first, np.diff(np.append(first, len(where)))


def coarsen(where: Int64s) -> tuple[Int64s, int, int]:
    """The same entries in larger units, so that one call moves fewer, longer rows.

    Returns:
        The units' places, the factor, and the offset (in old units) at which the first new unit starts:
        new unit i covers old units `offset + factor * i` and so on. No entry may be at -1.
    """
    breaks = np.flatnonzero(np.diff(where) != 1) + 1
    first = np.concatenate(([0], breaks))
    starts = where[first]
    factor = int(np.gcd(np.gcd.reduce(starts - starts[0]), np.gcd.reduce(np.append(breaks, len(where)))))
    offset = int(starts[0]) % factor
    return (where[::factor] - offset) // factor, factor, offset


def segments(where: Int64s) -> list[tuple[int, int]]:
    """Spans of entries that are not at -1."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], where >= 0, [False])).astype(np.int8)))
    return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
