"""Selection of the tier that serves each chunk. Pure functions and data, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


class Cover:
    """The fastest tier of each chunk, filled in as lookups return.

    Args:
        count: Number of chunks.

    Attributes:
        tiers: For each chunk the index of a tier, or None if none is known.
    """

    def __init__(self, count: int) -> None:
        self.tiers: list[int | None] = [None] * count
        self._prefix = 0

    @property
    def prefix(self) -> int:
        """Number of leading chunks with a tier; the position of the first hole."""
        while self._prefix < len(self.tiers) and self.tiers[self._prefix] is not None:
            self._prefix += 1
        return self._prefix

    def holes(self) -> list[int]:
        """Return the positions without a tier, from the first hole on."""
        return [i for i in range(self.prefix, len(self.tiers)) if self.tiers[i] is None]

    def mark(self, tier: int, positions: Sequence[int]) -> None:
        """Set the tier of the chunks at `positions`. The tier that was set first is kept."""
        for position in positions:
            if self.tiers[position] is None:
                self.tiers[position] = tier


def runs(tiers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group consecutive chunks of the same tier: (tier, start, stop) in prefix order."""
    if tiers and tiers.count(tiers[0]) == len(tiers):  # by far the most frequent case
        return [(tiers[0], 0, len(tiers))]
    result: list[tuple[int, int, int]] = []
    start = 0
    for tier, group in groupby(tiers):
        stop = start + sum(1 for _ in group)
        result.append((tier, start, stop))
        start = stop
    return result
