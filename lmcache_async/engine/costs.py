"""Measured load times of tiers, each as a latency and a time per chunk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.stack import TierStack
from lmcache_async.types import ChunkKey, RetrieveReport

STALE_S = 10.0
"""Age of the last measurement of a tier after which the next lookup with a hit in the tier reads one chunk.

Without this, a tier that was slow once and is not loaded from any more would count as slow forever.
"""


class CostLine:
    """Seconds as a linear function of a count: a latency, and a cost per item.

    Least squares over all observations. Weights decay exponentially, so that the line follows changes of the
    speed. If the fit gives a negative slope or a negative latency, as a few similar observations can, the line
    through the origin is used instead.

    The weight of an observation decays by the factor `memory` with each later one.
    """

    def __init__(self, *, memory: float = 0.7) -> None:
        self._memory = memory
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, count: float, seconds: float) -> None:
        """Add an observation: `count` items took `seconds`."""
        keep = self._memory
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + count
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + count * count
        self._xy = keep * self._xy + count * seconds

    @property
    def known(self) -> bool:
        """Whether there is an observation."""
        return self._xx > 0

    @property
    def line(self) -> tuple[float, float]:
        """Latency and seconds per item; zeros without an observation."""
        if not self.known:
            return 0.0, 0.0
        variance = self._xx * self._weight - self._x * self._x
        if variance > 1e-6 * self._xx * self._weight:
            each = (self._xy * self._weight - self._x * self._y) / variance
            latency = (self._y - each * self._x) / self._weight
            if each > 0 and latency > 0:
                return latency, each
        return 0.0, self._xy / self._xx

    def seconds(self, count: float) -> float:
        """Return the estimated seconds for `count` items."""
        latency, each = self.line
        return latency + each * count if count > 0 else 0.0


class LoadCosts:
    """Measured load time of each slow tier, as a line of seconds over chunks. Used on the engine's loop.

    Chunks in host memory have cost 0: copying them is always faster than computing, and a slow load from
    host memory has waited for something else.
    """

    def __init__(self, stack: TierStack, arena: Arena, chunk_size: int) -> None:
        self._stack = stack
        self._arena = arena
        self._slow = {stacked.id: i for i, stacked in enumerate(stack.tiers) if stacked.leaves_memory}
        self._lines = {tier: CostLine() for tier in self._slow.values()}
        self._measured_at = dict.fromkeys(self._lines, 0.0)
        self._chunk_size = chunk_size

    def note(self, report: RetrieveReport) -> None:
        """Record a finished load. Its time is attributed to a slow tier if that is the only one that took part."""
        match [name for name in report.by_tier if name in self._slow]:
            case [name]:
                self._note(self._slow[name], report.by_tier[name] / self._chunk_size, report.seconds)

    def _note(self, tier: int, chunks: float, seconds: float) -> None:
        self._lines[tier].note(chunks, seconds)
        self._measured_at[tier] = asyncio.get_running_loop().time()

    def cumulative(self, tiers: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """Return the `costs` of a `LookupResult` for the index of the tier of each chunk of a hit.

        A tier that was never measured has cost 0, so that it is used and measured.
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
        """Measure a tier by reading one chunk, which is discarded. Does nothing if no memory is free."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        with contextlib.suppress(TierError, BudgetExceededError):  # a later lookup tries again
            (buffer,) = await self._stack.tiers[tier].tier.get(
                [key], partial(self._arena.lease, timeout_s=0.0)
            )
            if isinstance(buffer, Buffer):
                buffer.release()
                self._note(tier, 1, loop.time() - start)

    def stale(self, tiers: Sequence[int]) -> int | None:
        """Return the position of a chunk in a slow tier that should be measured again; None if there is none."""
        now = asyncio.get_running_loop().time()
        for tier, line in self._lines.items():
            if line.known and now - self._measured_at[tier] > STALE_S and tier in tiers:
                self._measured_at[tier] = now  # one measurement at a time
                return tiers.index(tier)
        return None
