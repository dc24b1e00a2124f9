"""Prefix lookup with optional pinning and with estimates of the load time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lmcache_async.engine.costs import LoadCosts
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.stack import TierStack
from lmcache_async.types import ChunkKey


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The stored prefix of a prompt.

    Attributes:
        count: Number of leading chunks that are stored.
        by_tier: Number of these chunks that each tier would serve, by tier id.
        pinned: Number of these chunks that are pinned in host memory.
        costs: For each run of chunks in one tier: number of chunks up to its end, and estimated seconds to
            load all of these.
    """

    count: int
    by_tier: Mapping[str, int]
    pinned: int = 0
    costs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstPresent:
    """Position of the first stored run of keys, and how many of its chunks are pinned in host memory.

    `tier` is the id of the tier that would serve its last chunk; "" for an empty run.
    """

    position: int
    pinned: int
    tier: str


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


class MemoryLookups:
    """Looks up which chunks of one prompt the fastest tier has in the arena. Any thread may use it; no call suspends.

    Nothing is leased, so a chunk may be evicted before it is used. In the results `pinned` is the number of chunks in
    the arena.

    Args:
        tier_id: Id of the fastest tier.
        count: Returns the number of leading keys that this tier has in the arena; None if it is not known.
        others_lack: Returns whether all other tiers report, without a query, that they lack a chunk.

    Attributes:
        certain: Whether every lookup so far was final: it found all keys, or all tiers report without a query that they do not
            have the first key that it did not find.
    """

    def __init__(
        self,
        tier_id: str,
        count: Callable[[Sequence[ChunkKey]], int | None],
        others_lack: Callable[[ChunkKey], bool] = lambda _: False,
    ) -> None:
        self._id = tier_id
        self._count_in_memory = count
        self._others_lack = others_lack
        self.certain = True

    @classmethod
    def of_stack(cls, stack: TierStack) -> Self:
        """Look up in the tiers of an engine, of which there is at least one."""
        first, *others = stack.tiers
        return cls(
            first.id,
            first.tier.count_in_memory,
            lambda key: all(stacked.tier.lacks(key) for stacked in others),
        )

    async def lookup_keys(self, keys: Sequence[ChunkKey], *, lookup_id: str | None = None) -> LookupResult:
        del lookup_id
        count = self._count(keys)
        if not count:
            return LookupResult(count=0, by_tier={})
        return LookupResult(count, {self._id: count}, pinned=count, costs=((count, 0.0),))

    async def first_present(
        self, runs: Sequence[Sequence[ChunkKey]], *, lookup_id: str | None = None
    ) -> FirstPresent | None:
        del lookup_id
        for position, run in enumerate(runs):
            if self._count(run) == len(run):
                return FirstPresent(position, len(run), self._id if run else "")
        return None

    def _count(self, keys: Sequence[ChunkKey]) -> int:
        found = self._count_in_memory(keys)
        count = found or 0
        if count < len(keys):
            self.certain &= found is not None and self._others_lack(keys[count])
        return count


@dataclass(kw_only=True, slots=True, eq=False)
class Lookups:
    """Look up keys in the tiers, and pin chunks in host memory for lookups with an id."""

    stack: TierStack
    pins: Pins
    costs: LoadCosts
    timeout_s: float  # chunks without an answer by then are misses
    spawn: Callable[[Coroutine[Any, Any, None]], None]  # starts background work

    async def prefix(self, keys: Sequence[ChunkKey], lookup_id: str | None) -> LookupResult:
        """Return the longest stored prefix. Earlier pins of the same id are released."""
        tiers, _ = await self.stack.plan(keys, deadline=self._deadline())
        pinned = 0
        if lookup_id is not None:
            self.pins.release(lookup_id)
            pinned = await self._pin(keys, tiers, lookup_id)
        names = [stacked.id for stacked in self.stack.tiers]
        by_tier = dict(Counter(names[tier] for tier in tiers))
        costs = self.costs.cumulative(tiers)
        if (stale := self.costs.stale(tiers)) is not None:
            self.spawn(self.costs.measure(keys[stale], tiers[stale]))
        return LookupResult(count=len(tiers), by_tier=by_tier, pinned=pinned, costs=costs)

    async def first(self, runs: Sequence[Sequence[ChunkKey]], lookup_id: str | None) -> FirstPresent | None:
        """Return the first run of keys that the tiers have completely. Its pins are added to those of the same id."""
        found = await self._find(runs)
        if found is None:
            return None
        position, tiers = found
        pinned = await self._pin(runs[position], tiers, lookup_id) if lookup_id is not None else 0
        return FirstPresent(position, pinned, self.stack.tiers[tiers[-1]].id if tiers else "")

    async def _find(self, runs: Sequence[Sequence[ChunkKey]]) -> tuple[int, Sequence[int]] | None:
        """Query the first run alone, because it is often found, and then all others concurrently."""
        deadline = self._deadline()
        if runs:
            tiers, _ = await self.stack.plan(runs[0], deadline=deadline)
            if len(tiers) == len(runs[0]):
                return 0, tiers
        async with asyncio.TaskGroup() as group:
            plans = [group.create_task(self.stack.plan(run, deadline=deadline)) for run in runs[1:]]
        for position, plan in enumerate(plans, 1):
            tiers, _ = plan.result()
            if len(tiers) == len(runs[position]):
                return position, tiers
        return None

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.timeout_s

    async def _pin(self, keys: Sequence[ChunkKey], tiers: Sequence[int], lookup_id: str) -> int:
        arena = {i for i, each in enumerate(self.stack.tiers) if not each.leaves_memory}
        held = [i for i, tier in enumerate(tiers) if tier in arena]
        held = held[: self.pins.room]
        leases = await self.stack.lease_in_arena([keys[i] for i in held], [tiers[i] for i in held])
        return self.pins.hold(lookup_id, leases)
