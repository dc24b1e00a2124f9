"""Which tier serves which chunk: pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


class Cover:
    """What is known of where chunks are: each chunk's fastest tier, filled in as tiers answer."""

    def __init__(self, count: int) -> None:
        self.tiers: list[int | None] = [None] * count
        self._prefix = 0

    @property
    def prefix(self) -> int:
        """How many leading chunks are covered: the position of the first hole."""
        while self._prefix < len(self.tiers) and self.tiers[self._prefix] is not None:
            self._prefix += 1
        return self._prefix

    def holes(self) -> list[int]:
        """Positions from the first hole on that no tier covers yet."""
        return [i for i in range(self.prefix, len(self.tiers)) if self.tiers[i] is None]

    def mark(self, tier: int, positions: Sequence[int]) -> None:
        """Tier `tier` has the chunks at `positions`; a position keeps the tier that marked it first."""
        for position in positions:
            if self.tiers[position] is None:
                self.tiers[position] = tier


def runs(tiers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbouring chunks of one tier together: (tier, start, stop) in prefix order."""
    result: list[tuple[int, int, int]] = []
    start = 0
    for tier, group in groupby(tiers):
        stop = start + sum(1 for _ in group)
        result.append((tier, start, stop))
        start = stop
    return result
