"""Allocator for records of several sizes in one piece of memory: segments of equal blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.memory.buffer import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lmcache_async.types import ChunkKey

FIRST_BLOCKS = 4
"""Blocks of the first segment of a size. Partial chunks have many sizes with few records each."""
SEGMENT_BYTES = 64 << 20


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one record, and its state in the pool.

    Attributes:
        offset: Offset of its first byte, a multiple of 4096.
        segment: The segment that it belongs to.
        tenant: The tenant that holds it.
        nbytes: Length of the record.
        key: Key of the record; of a reservation the intended key, if known.
        leases: Leases of readers and of the writer.
        committed: Whether readers find the record.
        used: Last use, on the pool's own clock.
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
        """Bytes that count against quotas: whole pages."""
        return pages(self.nbytes)


@dataclass(eq=False, slots=True)
class Segment:
    """`count` blocks of `size` bytes from `start` on."""

    start: int
    size: int
    count: int
    free: list[int]
    taken: dict[int, Block] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.size * self.count


class SegmentAllocator:
    """Blocks of any size, allocated in O(1) if one of that size is free.

    A segment is created when its block size is needed, and dissolved when its last block is returned. New
    segments of a size grow with the number of its blocks, up to `segment_bytes`. A free block that is up to
    an eighth larger than the record is used before a segment is created.

    Args:
        nbytes: Size of the memory; bytes beyond the last whole page are not used.
        segment_bytes: Size limit of a segment with more than one block.
    """

    def __init__(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.nbytes = nbytes // PAGE * PAGE
        self._segment_bytes = segment_bytes
        self._gaps: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []  # start, length
        self._segments: dict[int, Segment] = {}
        self._open: dict[int, dict[Segment, None]] = {}  # by size, those with a free block
        self._blocks: dict[int, int] = {}  # by size, in all its segments

    @property
    def segments(self) -> int:
        return len(self._segments)

    @property
    def gap_bytes(self) -> int:
        """Bytes in no segment."""
        return sum(length for _, length in self._gaps)

    def take(self, tenant: str, nbytes: int) -> Block | None:
        """Allocate a block; None if that requires an eviction."""
        size = max(pages(nbytes), PAGE)
        nearest = min((there for there in self._open if size <= there <= nearly(size)), default=None)
        segment = self._cut(size) if nearest is None else next(iter(self._open[nearest]))
        if segment is None:
            return None
        offset = segment.free.pop()
        block = segment.taken[offset] = Block(offset, segment, tenant, nbytes)
        if not segment.free:
            self._close(segment)
        return block

    def give(self, block: Block) -> None:
        """Return a block."""
        segment = block.segment
        del segment.taken[block.offset]
        segment.free.append(block.offset)
        self._open.setdefault(segment.size, {})[segment] = None
        if not segment.taken:
            self._dissolve(segment)

    def fits(self, block: Block, nbytes: int) -> bool:
        """Whether the block, once returned, would be used for a record of that length."""
        size = max(pages(nbytes), PAGE)
        return size <= block.segment.size <= nearly(size)

    def has_size_for(self, nbytes: int) -> bool:
        """Whether there is a block for records of that length, free or not."""
        size = max(pages(nbytes), PAGE)
        return any(size <= there <= nearly(size) for there in self._blocks)

    def cheapest(self, nbytes: int, price: Callable[[Segment], int | None]) -> tuple[int, list[Segment]]:
        """Return the adjacent segments that are cheapest to empty for a record, and their price.

        The price of several segments is the highest of theirs. The list is empty if there are none.

        Args:
            nbytes: Length of the record.
            price: Price of emptying a segment; None if that is not possible.
        """
        found: tuple[int, list[Segment]] = (0, [])
        extents = list(self._extents())
        prices = {segment.start: price(segment) for _, segment in extents if segment is not None}
        for first in range(len(extents)):
            length, dearest, run = 0, 0, list[Segment]()
            for last in range(first, len(extents)):
                extent, segment = extents[last]
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

    def _extents(self) -> Iterator[tuple[int, Segment | None]]:
        """Yield the lengths of all gaps and segments, in order of their addresses."""
        there: list[tuple[int, int, Segment | None]] = [(start, length, None) for start, length in self._gaps]
        there += [(segment.start, segment.nbytes, segment) for segment in self._segments.values()]
        for _, length, segment in sorted(there, key=lambda extent: extent[0]):
            yield length, segment

    def _cut(self, size: int) -> Segment | None:
        """Create a segment in the first gap that holds it, or else a smaller one in the largest gap."""
        grown = max(FIRST_BLOCKS, self._blocks.get(size, 0))
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
        self._blocks[size] = self._blocks.get(size, 0) + count
        self._open.setdefault(size, {})[segment] = None
        return segment

    def _close(self, segment: Segment) -> None:
        """Mark a segment as full."""
        segments = self._open[segment.size]
        del segments[segment]
        if not segments:
            del self._open[segment.size]

    def _dissolve(self, segment: Segment) -> None:
        self._close(segment)
        del self._segments[segment.start]
        self._blocks[segment.size] -= segment.count
        if not self._blocks[segment.size]:
            del self._blocks[segment.size]
        start, length = segment.start, segment.nbytes
        index = bisect_left(self._gaps, (start, 0))
        if index < len(self._gaps) and self._gaps[index][0] == start + length:
            length += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == start:
            before = self._gaps.pop(index - 1)
            start, length = before[0], before[1] + length
        insort(self._gaps, (start, length))


def pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def nearly(size: int) -> int:
    """Return the largest block used for a record of `size` bytes."""
    return size + size // 8
