"""Tests of capacity limits, and of the order of eviction for tiers that evict suffixes first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from lmcache_async.errors import ConfigError, TierError, TierFullError
from lmcache_async.memory.arena import Arena
from lmcache_async.testing.conformance.base import Cases, TierRig, are_answers, in_time, opened_rig
from lmcache_async.testing.records import MAX_PAYLOAD_BYTES, SLAB_BYTES, key_of
from lmcache_async.tiers.base import Tier
from lmcache_async.types import ChunkKey

ROOM = 6
"""Capacity of the limited tier, in full slabs."""


class LimitedCases(Cases):
    """Fixtures of the tests of limits."""

    @pytest_asyncio.fixture
    async def limited(self, tier: Tier, arena: Arena) -> AsyncIterator[TierRig | None]:
        """An open tier with a capacity of six full records; None if tiers of its kind have no limit."""
        limited = self.limit(tier, ROOM * SLAB_BYTES)
        if limited is None:
            yield None
            return
        evicted: list[ChunkKey] = []
        thread = threading.get_ident()

        def report(keys: Sequence[ChunkKey]) -> None:
            assert threading.get_ident() == thread, "on_evicted was called outside of the event loop's thread"
            evicted.extend(keys)

        limited.on_evicted = report
        async with opened_rig(limited, arena) as rig:
            rig.length = lambda _: MAX_PAYLOAD_BYTES
            rig.evicted = evicted
            yield rig
            await rig.check_leases()


class CapacityCases(LimitedCases):
    """`max_bytes` is never exceeded. A full tier evicts chunks or raises TierFullError."""

    async def test_a_tier_without_a_limit_declares_none(self, limited: TierRig | None, tier: Tier) -> None:
        if limited is None:
            assert tier.statistics().max_bytes is None, (
                "statistics() has a max_bytes: override `limit` in the test class to test it"
            )
        else:
            assert limited.statistics.max_bytes is not None, "statistics() of a limited tier has no max_bytes"

    @pytest.mark.parametrize(
        ("count", "length"),
        [(3 * ROOM, lambda _: MAX_PAYLOAD_BYTES), (200, lambda number: number % 300)],
        ids=["full slabs", "small records"],
    )
    async def test_a_full_tier_stays_within_its_limit_and_returns_its_chunks(
        self, limited: TierRig | None, count: int, length: Callable[[int], int]
    ) -> None:
        if limited is None:
            return
        limited.length = length
        taken = []
        for number in range(count):
            try:
                await limited.put(number)
            except TierFullError:
                continue
            taken.append(number)
            assert _bytes_within_limit(limited) > 0
            assert await limited.holds(number), "put has ended, but the chunk is not stored"
        held = await limited.stored(range(count))

        assert held, "all records are lost"
        nbytes = sum(map(length, held))
        assert nbytes <= ROOM * SLAB_BYTES, f"{nbytes} bytes are stored; the limit is {ROOM * SLAB_BYTES}"
        gone, evictions = [number for number in taken if number not in held], limited.statistics.evictions
        assert len(gone) == evictions, f"{len(gone)} records are gone, but {evictions} evictions are counted"
        if self.reports_evictions and not limited.statistics.common:
            assert sorted(limited.evicted) == sorted(map(key_of, gone)), (
                "on_evicted was not called once for each evicted chunk"
            )
        await limited.check_stored(*held)

    async def test_a_record_larger_than_the_limit_is_refused(self, tier: Tier, arena: Arena) -> None:
        small = self.limit(tier, SLAB_BYTES // 2)
        if small is None:
            return
        with contextlib.suppress(ConfigError):  # the tier accepts no limit below one slab
            async with opened_rig(small, arena) as rig:
                rig.length = lambda _: MAX_PAYLOAD_BYTES
                with pytest.raises(TierError):
                    await in_time(rig.put(1))

                assert not await rig.contains(1), "a record larger than max_bytes is stored"
                await rig.check_leases()

    async def test_concurrent_puts_stay_within_the_limit(self, limited: TierRig | None) -> None:
        if limited is None:
            return
        halves = asyncio.gather(limited.put_many(range(8)), limited.put_many(range(8, 16)))
        while not halves.done():
            _bytes_within_limit(limited)
            await asyncio.sleep(0)
        answers = [answer for half in await in_time(halves) for answer in half]

        assert len(answers) == 16
        assert are_answers(answers)
        assert None in answers, "no record was stored"
        assert _bytes_within_limit(limited) > 0
        held = await limited.stored(range(16))
        assert held
        await limited.check_stored(*held)

    async def test_a_removal_makes_room(self, limited: TierRig | None) -> None:
        if limited is None or not limited.tier.capabilities.removes:
            return
        await limited.put(*range(ROOM - 1))
        full = limited.statistics.bytes
        assert await limited.remove(0)
        assert limited.statistics.bytes < full, "statistics().bytes did not fall after a removal"
        evictions = limited.statistics.evictions
        await limited.put(ROOM)

        assert limited.statistics.evictions == evictions, (
            "a put evicted a chunk although a removal had made room"
        )
        await limited.check_stored(ROOM)


def _bytes_within_limit(limited: TierRig) -> int:
    """Return the bytes of the tier, and assert that they do not exceed its limit."""
    statistics = limited.statistics
    assert statistics.max_bytes is not None
    assert statistics.bytes <= statistics.max_bytes
    return statistics.bytes


class SuffixEvictionConformance(LimitedCases):
    """Tests of eviction in LRU order, suffixes before their prefixes.

    A second base class in addition to TierConformance, for tiers that use LRUPolicy or follow the same order. The
    limited tier must have a capacity of exactly six full records.
    """

    async def test_a_full_tier_keeps_the_newest_chunks(self, limited: TierRig | None) -> None:
        assert limited is not None, "a tier that evicts has a limit: override `limit`"
        await limited.put(*range(3 * ROOM))
        held = await limited.stored(range(3 * ROOM))

        assert held == list(range(2 * ROOM, 3 * ROOM)), "the stored chunks are not the newest ones"
        assert limited.statistics.evictions == 2 * ROOM
        await limited.check_stored(*held)

    async def test_a_used_chunk_is_evicted_after_unused_ones(self, limited: TierRig | None) -> None:
        assert limited is not None
        await limited.put(*range(ROOM))
        await limited.check_stored(0)
        await limited.put(50)

        assert await limited.contains(0), "a chunk that was just read was evicted"
        assert not await limited.contains(1), "the least recently used chunk was not evicted"

    async def test_a_full_tier_evicts_suffixes_before_their_prefixes(self, limited: TierRig | None) -> None:
        assert limited is not None
        old = [key_of(number) for number in range(4)]
        await limited.tier.contains_many(old)  # as a lookup does: the keys are of one prompt
        await limited.put(*range(4), *range(10, 14))  # one call for each, so that the first is the oldest

        found = await limited.tier.contains_many(old)
        assert found == [True, True, False, False], "a prefix was evicted before its suffix"
