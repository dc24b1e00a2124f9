"""Room for records of several sizes in one piece of memory: segments, each cut for one size."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.memory.buffer import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmcache_async.types import ChunkKey

FIRST_PIECES = 4
"""Of the first segment of a size: ends of prompts have many sizes, and a few records of each."""

SEGMENT_BYTES = 64 << 20


@dataclass(eq=False, slots=True)
class Place:
    """Memory for one record, and what is known of it.

    Attributes:
        offset: Of its first byte, a multiple of 4096.
        segment: What it is a piece of.
        tenant: Whose it is.
        nbytes: The record's length.
        key: The record's; of a reservation the one it is meant for, where that is known.
        leases: Readers that have it, and its writer.
        committed: Whether readers find it.
        used: When it was used last, on the pool's own clock.
    """

    offset: int
    segment: Segment
    tenant: str
    nbytes: int
    key: ChunkKey | None = None
    leases: int = 0
    committed: bool = False
    used: int = 0

    @property
    def held_bytes(self) -> int:
        """What counts against quotas: whole pages."""
        return pages(self.nbytes)


@dataclass(eq=False, slots=True)
class Segment:
    """`count` pieces of `size` bytes from `start` on."""

    start: int
    size: int
    count: int
    free: list[int]
    taken: dict[int, Place] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.size * self.count


class Room:
    """Pieces of memory of any size, in O(1) where one of that size is free.

    A segment is made when its size is needed and is no more when its last piece is given back. A size's
    segments grow with it, up to `segment_bytes`. A record that a piece up to an eighth larger is free for
    takes that rather than a segment.

    Args:
        nbytes: Of all the memory; what is beyond the last whole page is not used.
        segment_bytes: Of the largest segment that has more than one piece.
    """

    def __init__(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.nbytes = nbytes // PAGE * PAGE
        self._segment_bytes = segment_bytes
        self._gaps: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []  # start, length
        self._segments: dict[int, Segment] = {}
        self._open: dict[int, dict[Segment, None]] = {}  # by size, those with a free piece
        self._pieces: dict[int, int] = {}  # by size, in all its segments

    @property
    def segments(self) -> int:
        return len(self._segments)

    @property
    def gap_bytes(self) -> int:
        """Bytes in no segment."""
        return sum(length for _, length in self._gaps)

    def take(self, tenant: str, nbytes: int) -> Place | None:
        """Memory for a record; None when there is none without emptying a segment or giving up a record."""
        size = max(pages(nbytes), PAGE)
        nearest = min((there for there in self._open if size <= there <= nearly(size)), default=None)
        segment = self._cut(size) if nearest is None else next(iter(self._open[nearest]))
        if segment is None:
            return None
        offset = segment.free.pop()
        place = segment.taken[offset] = Place(offset, segment, tenant, nbytes)
        if not segment.free:
            self._close(segment)
        return place

    def give(self, place: Place) -> None:
        """Take back what `take` gave."""
        segment = place.segment
        del segment.taken[place.offset]
        segment.free.append(place.offset)
        self._open.setdefault(segment.size, {})[segment] = None
        if not segment.taken:
            self._dissolve(segment)

    def fits(self, place: Place, nbytes: int) -> bool:
        """Whether the place, given back, would be taken for a record of that length."""
        size = max(pages(nbytes), PAGE)
        return size <= place.segment.size <= nearly(size)

    def has_size_for(self, nbytes: int) -> bool:
        """Whether there is any piece for records of that length, free or not."""
        size = max(pages(nbytes), PAGE)
        return any(size <= there <= nearly(size) for there in self._pieces)

    def cheapest(self, nbytes: int, price: Callable[[Segment], int | None]) -> tuple[int, list[Segment]]:
        """The neighbours that, emptied, have room for a record of that length, and their price.

        The price of several is that of the dearest; no segments where there are none to be had.

        Args:
            price: Of emptying one; None where that cannot be done.
        """
        found: tuple[int, list[Segment]] = (0, [])
        extents = list(self._extents())
        prices = {segment.start: price(segment) for _, segment in extents if segment is not None}
        for first in range(len(extents)):
            length, dearest, run = 0, 0, list[Segment]()
            for extent, segment in extents[first:]:
                length += extent
                if segment is not None:
                    cost = prices[segment.start]
                    if cost is None:
                        break
                    dearest = max(dearest, cost)
                    run.append(segment)
                if length >= nbytes:
                    if not found[1] or dearest < found[0]:
                        found = dearest, run
                    break
        return found

    def places(self) -> Iterator[Place]:
        for segment in self._segments.values():
            yield from segment.taken.values()

    def _extents(self) -> Iterator[tuple[int, Segment | None]]:
        """Lengths of all gaps and segments, as they lie in memory."""
        there: list[tuple[int, int, Segment | None]] = [(start, length, None) for start, length in self._gaps]
        there += [(segment.start, segment.nbytes, segment) for segment in self._segments.values()]
        for _, length, segment in sorted(there, key=lambda extent: extent[0]):
            yield length, segment

    def _cut(self, size: int) -> Segment | None:
        """A new segment: of the first gap that it fits in, or else of what the largest gap has room for."""
        grown = max(FIRST_PIECES, self._pieces.get(size, 0))
        count = max(1, min(grown, self._segment_bytes // size))
        gap = next((gap for gap in self._gaps if gap[1] >= count * size), None)
        if gap is None:
            gap = max(self._gaps, key=lambda gap: gap[1], default=(0, 0))
            count = gap[1] // size
            if not count:
                return None
        start, length = gap
        self._gaps.remove(gap)
        if length > count * size:
            insort(self._gaps, (start + count * size, length - count * size))
        free = [start + index * size for index in reversed(range(count))]
        segment = self._segments[start] = Segment(start, size, count, free)
        self._pieces[size] = self._pieces.get(size, 0) + count
        self._open.setdefault(size, {})[segment] = None
        return segment

    def _close(self, segment: Segment) -> None:
        """It is not open any more."""
        segments = self._open[segment.size]
        del segments[segment]
        if not segments:
            del self._open[segment.size]

    def _dissolve(self, segment: Segment) -> None:
        self._close(segment)
        del self._segments[segment.start]
        self._pieces[segment.size] -= segment.count
        if not self._pieces[segment.size]:
            del self._pieces[segment.size]
        start, length = segment.start, segment.nbytes
        index = bisect_left(self._gaps, (start, 0))
        if index < len(self._gaps) and self._gaps[index][0] == start + length:
            length += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == start:
            before = self._gaps.pop(index - 1)
            start, length = before[0], before[1] + length
        insort(self._gaps, (start, length))


def pages(nbytes: int) -> int:
    """`nbytes` and what is left of the last page."""
    return -(-nbytes // PAGE) * PAGE


def nearly(size: int) -> int:
    """The largest piece that a record of `size` bytes takes."""
    return size + size // 8
