"""Tests of capacity limits, and of the order of eviction for tiers that evict suffixes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from lmcache_async.errors import TierFullError
from lmcache_async.memory.arena import Arena
from lmcache_async.testing.conformance.base import (
    Cases,
    are_answers,
    holds,
    in_time,
    leases_are_back,
    put,
    record,
)
from lmcache_async.testing.records import MAX_PAYLOAD_BYTES, SLAB_BYTES, key_of
from lmcache_async.tiers.base import Allocate, Tier

ROOM = 6
"""Capacity of the limited tier, in full slabs."""


class LimitedCases(Cases):
    """Fixtures of the tests of limits."""

    @pytest_asyncio.fixture
    async def limited(self, tier: Tier, arena: Arena) -> AsyncIterator[Tier | None]:
        """An open tier with a capacity of six full records; None if tiers of its kind have no limit."""
        limited = self.limit(tier, ROOM * SLAB_BYTES)
        if limited is None:
            yield None
            return
        limited.bind(arena)
        async with limited:
            yield limited


class CapacityCases(LimitedCases):
    """`max_bytes` is never exceeded. A full tier evicts chunks or raises TierFullError."""

    async def test_a_tier_without_a_limit_declares_none(self, limited: Tier | None, tier: Tier) -> None:
        if limited is None:
            assert tier.statistics().max_bytes is None, (
                "statistics() names a limit: override `limit` in the test class, so that it can be tested"
            )
        else:
            assert limited.statistics().max_bytes is not None, "a limited tier's statistics() names no limit"

    async def test_a_full_tier_stays_within_its_limit_and_serves_what_it_says_it_has(
        self, limited: Tier | None, arena: Arena, allocate: Allocate
    ) -> None:
        if limited is None:
            return
        max_bytes = limited.statistics().max_bytes
        assert max_bytes is not None
        taken = 0
        for number in range(3 * ROOM):
            try:
                await put(limited, arena, [number], MAX_PAYLOAD_BYTES)
            except TierFullError:
                continue
            taken += 1
            assert 0 < limited.statistics().bytes <= max_bytes
            assert await holds(limited, number, allocate, MAX_PAYLOAD_BYTES), "put has ended, it is not there"
        held = [number for number in range(3 * ROOM) if await limited.contains(key_of(number))]

        assert 0 < len(held) <= ROOM
        assert len(held) == taken - limited.statistics().evictions
        for number in held:
            assert await holds(limited, number, allocate, MAX_PAYLOAD_BYTES)
        await leases_are_back(limited, arena)

    async def test_small_records_do_not_slip_past_the_limit(
        self, limited: Tier | None, arena: Arena, allocate: Allocate
    ) -> None:
        if limited is None:
            return
        max_bytes = limited.statistics().max_bytes
        assert max_bytes is not None
        for number in range(200):
            buffer = record(arena, number, number % 300)
            [answer] = await limited.put_many([(key_of(number), buffer)])
            buffer.release()
            assert answer is None or isinstance(answer, TierFullError)
            assert limited.statistics().bytes <= max_bytes
        held = [number for number in range(200) if await limited.contains(key_of(number))]

        assert held
        assert all([await holds(limited, number, allocate, number % 300) for number in held])

    async def test_many_puts_at_once_into_a_small_tier_end_within_its_limit(
        self, limited: Tier | None, arena: Arena, allocate: Allocate
    ) -> None:
        if limited is None:
            return
        max_bytes = limited.statistics().max_bytes
        assert max_bytes is not None
        items = [(key_of(number), record(arena, number, MAX_PAYLOAD_BYTES)) for number in range(16)]
        halves = asyncio.gather(limited.put_many(items[:8]), limited.put_many(items[8:]))
        while not halves.done():
            assert limited.statistics().bytes <= max_bytes
            await asyncio.sleep(0)
        answers = [answer for half in await in_time(halves) for answer in half]
        for _, buffer in items:
            buffer.release()

        assert len(answers) == 16
        assert are_answers(answers)
        assert None in answers, "none of them was taken"
        assert 0 < limited.statistics().bytes <= max_bytes
        held = [number for number in range(16) if await limited.contains(key_of(number))]
        assert held
        assert all([await holds(limited, number, allocate, MAX_PAYLOAD_BYTES) for number in held])
        await leases_are_back(limited, arena)

    async def test_a_removal_makes_room(self, limited: Tier | None, arena: Arena, allocate: Allocate) -> None:
        if limited is None or not limited.capabilities.removes:
            return
        await put(limited, arena, range(ROOM - 1), MAX_PAYLOAD_BYTES)
        full = limited.statistics().bytes
        assert await limited.remove(key_of(0))
        assert limited.statistics().bytes < full
        evictions = limited.statistics().evictions
        await put(limited, arena, [ROOM], MAX_PAYLOAD_BYTES)

        assert limited.statistics().evictions == evictions
        assert await holds(limited, ROOM, allocate, MAX_PAYLOAD_BYTES)


class SuffixEvictionConformance(LimitedCases):
    """Tests of eviction in LRU order, suffixes before their prefixes.

    An additional base beside TierConformance, for tiers that use LRUPolicy or follow the same order. The
    limited tier must have a capacity of exactly six full records.
    """

    async def test_a_full_tier_keeps_what_is_newest(
        self, limited: Tier | None, arena: Arena, allocate: Allocate
    ) -> None:
        assert limited is not None, "a tier that evicts has a limit: override `limit`"
        for number in range(3 * ROOM):
            await put(limited, arena, [number], MAX_PAYLOAD_BYTES)
        held = [number for number in range(3 * ROOM) if await limited.contains(key_of(number))]

        assert held == list(range(2 * ROOM, 3 * ROOM))
        assert limited.statistics().evictions == 2 * ROOM
        assert all([await holds(limited, number, allocate, MAX_PAYLOAD_BYTES) for number in held])

    async def test_use_keeps_a_chunk(self, limited: Tier | None, arena: Arena, allocate: Allocate) -> None:
        assert limited is not None
        await put(limited, arena, range(ROOM), MAX_PAYLOAD_BYTES)
        assert await holds(limited, 0, allocate, MAX_PAYLOAD_BYTES)
        await put(limited, arena, [50], MAX_PAYLOAD_BYTES)

        assert await limited.contains(key_of(0))
        assert not await limited.contains(key_of(1))

    async def test_a_full_tier_gives_up_suffixes_before_their_prefixes(
        self, limited: Tier | None, arena: Arena
    ) -> None:
        assert limited is not None
        old = [key_of(number) for number in range(4)]
        await limited.contains_many(old)  # as a lookup does: the keys are of one prompt
        for numbers in (range(4), range(10, 14)):  # one call for each, so that the first is the oldest
            await put(limited, arena, numbers, MAX_PAYLOAD_BYTES)

        assert await limited.contains_many(old) == [True, True, False, False]
