"""Allocator of address ranges in one piece of memory. No I/O."""

from __future__ import annotations

from bisect import bisect_left, insort

from lmcache_async.memory.buffer import PAGE


class RangeAllocator:
    """Best-fit allocator of ranges of whole pages. Adjacent unused ranges are merged.

    Args:
        nbytes: Size of the memory; bytes beyond the last whole page are not used.

    Attributes:
        free_bytes: Bytes of the unused ranges.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE * PAGE
        self.free_bytes = 0
        self._lengths: dict[int, int] = {}  # of unused ranges, by start
        self._starts: dict[int, int] = {}  # of unused ranges, by end
        self._by_length: list[tuple[int, int]] = []  # length, start
        if self.nbytes:
            self._add(0, self.nbytes)

    def __len__(self) -> int:
        """Number of unused ranges."""
        return len(self._by_length)

    def take(self, nbytes: int) -> int | None:
        """Take a range of `nbytes`, a multiple of the page size. Return its offset; None if no unused range is that long."""
        index = bisect_left(self._by_length, (nbytes, 0))
        if index == len(self._by_length):
            return None
        length, start = self._by_length[index]
        self._remove(start)
        if length > nbytes:
            self._add(start + nbytes, length - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Return a range to the unused ones."""
        end = start + nbytes
        if end in self._lengths:
            end += self._remove(end)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        self._add(start, end - start)

    def unused_around(self, start: int, end: int) -> tuple[int, int]:
        """Return the range extended by the unused ranges next to it."""
        return self._starts.get(start, start), end + self._lengths.get(end, 0)

    def _add(self, start: int, length: int) -> None:
        self._lengths[start] = length
        self._starts[start + length] = start
        insort(self._by_length, (length, start))
        self.free_bytes += length

    def _remove(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self.free_bytes -= length
        return length
