"""What loading from each tier costs: learnt from the loads, and from a chunk read now and then."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import TYPE_CHECKING

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.observability.rates import CostLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.memory.arena import Arena
    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.tiers.stack import TierStack
    from lmcache_async.types import ChunkKey, RetrieveReport

STALE_S = 10.0
"""A tier that nobody has loaded from for so long is asked for one chunk, beside what a lookup found in it.
Else one that was slow once, and is not loaded from any more, would count as slow for ever."""


class LoadCosts:
    """A line for each slow tier: a load's seconds over its chunks. Used on the engine's loop.

    Chunks in memory cost nothing here: a copy is always sooner than computing, and a load from there that
    took long has waited for something else.
    """

    def __init__(self, stack: TierStack, arena: Arena, chunk_size: int) -> None:
        self._stack = stack
        self._arena = arena
        self._slow = {stacked.id: i for i, stacked in enumerate(stack.tiers) if stacked.leaves_memory}
        self._lines = {tier: CostLine() for tier in self._slow.values()}
        self._noted = dict.fromkeys(self._lines, 0.0)
        self._chunk_size = chunk_size

    def note(self, report: RetrieveReport) -> None:
        """A load has ended. Where one slow tier took part, its time is that tier's."""
        slow = [name for name in report.by_tier if name in self._slow]
        if len(slow) == 1:
            self._note(self._slow[slow[0]], report.by_tier[slow[0]] / self._chunk_size, report.seconds)

    def _note(self, tier: int, chunks: float, seconds: float) -> None:
        self._lines[tier].note(chunks, seconds)
        self._noted[tier] = asyncio.get_running_loop().time()

    def ends(self, tiers: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """Of a hit: behind how many chunks a tier's run ends, and seconds to load all up to there.

        What was never measured counts as free, so that it will be.
        """
        found: list[tuple[int, float]] = []
        chunks, seconds = 0, 0.0
        for tier, run in groupby(tiers):
            count = len(list(run))
            line = self._lines.get(tier)
            chunks, seconds = chunks + count, seconds + (line.seconds(count) if line else 0.0)
            found.append((chunks, seconds))
        return tuple(found)

    async def measure(self, key: ChunkKey, tier: int) -> None:
        """Read one chunk and throw it away, where there is memory for it at once."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            buffer = await self._stack.tiers[tier].tier.get(key, self._allocate)
        except (TierError, BudgetExceededError):
            return  # the next lookup that finds it stale tries again
        if buffer is not None:
            buffer.release()
            self._note(tier, 1, loop.time() - start)

    async def _allocate(self, nbytes: int) -> Buffer:
        return await self._arena.lease(nbytes, timeout_s=0.0)

    def stale(self, tiers: Sequence[int]) -> int | None:
        """Position of a chunk of a slow tier that should be measured anew."""
        now = asyncio.get_running_loop().time()
        for tier, line in self._lines.items():
            if line.known and now - self._noted[tier] > STALE_S and tier in tiers:
                self._noted[tier] = now  # one at a time
                return tiers.index(tier)
        return None
