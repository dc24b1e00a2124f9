"""Prefix lookup with optional pinning and with estimates of the load time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lmcache_async.engine.costs import CostLine
from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from lmcache_async.memory.arena import Arena
    from lmcache_async.tiers.stack import TierStack
    from lmcache_async.types import ChunkKey, RetrieveReport

STALE_S = 10.0
"""Age of the last measurement of a tier after which the next lookup with a hit there reads one chunk.

Without this, a tier that was slow once and is not loaded from any more would count as slow forever.
"""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The stored prefix of a prompt.

    Attributes:
        count: Number of leading chunks that are stored.
        by_tier: How many of them each tier would serve, by tier id.
        pinned: How many of them are pinned in host memory.
        costs: For each run of chunks in one tier: number of chunks up to its end, and estimated seconds to
            load all of these.
    """

    count: int
    by_tier: Mapping[str, int]
    pinned: int = 0
    costs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstPresent:
    """Position of the first stored run of keys, and whether some of it is pinned in host memory."""

    position: int
    pinned: bool


class Pins:
    """Leases by lookup id, at most `max_buffers` for at most `ttl_s` seconds. Used on the loop's thread."""

    def __init__(self, *, max_buffers: int, ttl_s: float) -> None:
        self.max_buffers = max_buffers
        self._ttl_s = ttl_s
        self._held: dict[str, tuple[list[Buffer], asyncio.TimerHandle]] = {}
        self._closed = False
        self.count = 0

    @property
    def room(self) -> int:
        return max(0, self.max_buffers - self.count)

    def hold(self, lookup_id: str, buffers: Sequence[Buffer]) -> int:
        """Take over the leases, in addition to those of the same id; release those beyond the limit.

        All pins of an id end together. Its time limit starts again.

        Returns:
            Number of kept leases; these are the first ones.
        """
        room = 0 if self._closed else self.room
        kept = list(buffers[:room])
        for buffer in buffers[room:]:
            buffer.release()
        if kept:
            former: list[Buffer] = []
            if lookup_id in self._held:
                former, timer = self._held[lookup_id]
                timer.cancel()
            timer = asyncio.get_running_loop().call_later(self._ttl_s, self.release, lookup_id)
            self._held[lookup_id] = (former + kept, timer)
            self.count += len(kept)
        return len(kept)

    def release(self, lookup_id: str) -> None:
        held = self._held.pop(lookup_id, None)
        if held is None:
            return
        buffers, timer = held
        timer.cancel()
        self.count -= len(buffers)
        for buffer in buffers:
            buffer.release()

    def close(self) -> None:
        """Release all pins. Later leases of running lookups are released at once."""
        self._closed = True
        for lookup_id in list(self._held):
            self.release(lookup_id)


class LoadCosts:
    """Measured load time of each slow tier, as a line of seconds over chunks. Used on the engine's loop.

    Chunks in host memory cost nothing here: copying them is always faster than computing, and a slow load
    from there has waited for something else.
    """

    def __init__(self, stack: TierStack, arena: Arena, chunk_size: int) -> None:
        self._stack = stack
        self._arena = arena
        self._slow = {stacked.id: i for i, stacked in enumerate(stack.tiers) if stacked.leaves_memory}
        self._lines = {tier: CostLine() for tier in self._slow.values()}
        self._noted = dict.fromkeys(self._lines, 0.0)
        self._chunk_size = chunk_size

    def note(self, report: RetrieveReport) -> None:
        """Record a finished load. Its time is attributed to the slow tier if only one took part."""
        match [name for name in report.by_tier if name in self._slow]:
            case [name]:
                self._note(self._slow[name], report.by_tier[name] / self._chunk_size, report.seconds)

    def _note(self, tier: int, chunks: float, seconds: float) -> None:
        self._lines[tier].note(chunks, seconds)
        self._noted[tier] = asyncio.get_running_loop().time()

    def ends(self, tiers: Sequence[int]) -> tuple[tuple[int, float], ...]:
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
        """Read one chunk and discard it. Does nothing if no memory is free."""
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
        """Return the position of a chunk in a slow tier that should be measured again."""
        now = asyncio.get_running_loop().time()
        for tier, line in self._lines.items():
            if line.known and now - self._noted[tier] > STALE_S and tier in tiers:
                self._noted[tier] = now  # one measurement at a time
                return tiers.index(tier)
        return None


class Lookups:
    """Look up keys in the tiers, and pin chunks in host memory for lookups with an id.

    Chunks without an answer within `timeout_s` are misses. `spawn` starts background work.
    """

    def __init__(
        self,
        stack: TierStack,
        pins: Pins,
        costs: LoadCosts,
        *,
        timeout_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._stack = stack
        self._pins = pins
        self._costs = costs
        self._timeout_s = timeout_s
        self._spawn = spawn

    async def prefix(self, keys: Sequence[ChunkKey], lookup_id: str | None) -> LookupResult:
        """Return the longest stored prefix. Earlier pins of the same id are released."""
        try:
            async with asyncio.timeout(self._timeout_s):
                tiers, _ = await self._stack.plan(keys)
        except TimeoutError:
            return LookupResult(count=0, by_tier={})
        pinned = 0
        if lookup_id is not None:
            self._pins.release(lookup_id)
            pinned = await self._pin(keys, tiers, lookup_id)
        names = [stacked.id for stacked in self._stack.tiers]
        by_tier = dict(Counter(names[tier] for tier in tiers))
        costs = self._costs.ends(tiers)
        if (stale := self._costs.stale(tiers)) is not None:
            self._spawn(self._costs.measure(keys[stale], tiers[stale]))
        return LookupResult(count=len(tiers), by_tier=by_tier, pinned=pinned, costs=costs)

    async def first(self, runs: Sequence[Sequence[ChunkKey]], lookup_id: str | None) -> FirstPresent | None:
        """Return the first run of keys that the tiers have completely. Its pins are added to those of the same id."""
        found = await self._find(runs)
        if found is None:
            return None
        position, tiers = found
        pinned = await self._pin(runs[position], tiers, lookup_id) if lookup_id is not None else 0
        return FirstPresent(position, pinned=pinned > 0)

    async def _find(self, runs: Sequence[Sequence[ChunkKey]]) -> tuple[int, Sequence[int]] | None:
        """Query the first run alone, because it is often the one, and then all others at the same time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                for start, stop in ((0, 1), (1, len(runs))):
                    async with asyncio.TaskGroup() as group:
                        plans = [group.create_task(self._stack.plan(run)) for run in runs[start:stop]]
                    for position, plan in enumerate(plans, start):
                        tiers, _ = plan.result()
                        if len(tiers) == len(runs[position]):
                            return position, tiers
        return None

    async def _pin(self, keys: Sequence[ChunkKey], tiers: Sequence[int], lookup_id: str) -> int:
        arena = {i for i, each in enumerate(self._stack.tiers) if not each.leaves_memory}
        held = [i for i, tier in enumerate(tiers) if tier in arena]
        held = held[: self._pins.room]
        leases = await self._stack.lease_in_arena([keys[i] for i in held], [tiers[i] for i in held])
        return self._pins.hold(lookup_id, leases)
