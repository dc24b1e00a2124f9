"""Which chunks are there; and on demand they stay there until they are loaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from lmcache_async.engine.results import FirstPresent, LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from lmcache_async.engine.costs import LoadCosts
    from lmcache_async.engine.pins import Pins
    from lmcache_async.tiers.stack import TierStack
    from lmcache_async.types import ChunkKey


class Lookups:
    """Asks the tiers, and pins what is in host memory for who names a lookup id.

    Args:
        costs: Of loads, as measured.
        timeout_s: What has not been answered by then is not there.
        spawn: Runs something beside the lookups.
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
        """How many leading chunks are there. A former pin of the same id ends."""
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

    async def first(self, keys: Sequence[ChunkKey], lookup_id: str | None) -> FirstPresent | None:
        """The first key that any tier has; its pin is beside what the same lookup has pinned."""
        found = await self._find(keys)
        if found is None:
            return None
        position, tiers = found
        pinned = await self._pin([keys[position]], tiers, lookup_id) if lookup_id is not None else 0
        return FirstPresent(position, pinned=pinned > 0)

    async def _find(self, keys: Sequence[ChunkKey]) -> tuple[int, Sequence[int]] | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                for position, key in enumerate(keys):
                    tiers, _ = await self._stack.plan([key])
                    if tiers:
                        return position, tiers
        return None

    async def _pin(self, keys: Sequence[ChunkKey], tiers: Sequence[int], lookup_id: str) -> int:
        arena = {i for i, each in enumerate(self._stack.tiers) if not each.leaves_memory}
        held = [i for i, tier in enumerate(tiers) if tier in arena]
        held = held[: self._pins.room]
        leases = await self._stack.lease_in_arena([keys[i] for i in held], [tiers[i] for i in held])
        return self._pins.hold(lookup_id, leases)
