"""Tests of opening, closing and reopening."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.testing.conformance.base import (
    Cases,
    holds,
    in_time,
    leases_are_back,
    put,
    record,
    release_all,
)
from lmcache_async.testing.conformance.content import LENGTHS
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.base import Allocate, Tier


class LifecycleCases(Cases):
    """A tier works while it is open. Content that it keeps after closing is complete."""

    async def test_a_persistent_tier_has_its_chunks_after_it_was_reopened(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        tier.bind(arena)
        async with tier:
            for number, length in enumerate(LENGTHS):
                await put(tier, arena, [number], length)
            removed = await tier.remove(key_of(0))
            before = tier.statistics()
        if not tier.capabilities.persistent:
            assert arena.statistics().leased_slabs == 0
            return
        for _ in range(2):
            again = self.reopen(tier)
            again.bind(arena)
            async with again:
                assert (again.statistics().chunks, again.statistics().bytes) == (before.chunks, before.bytes)
                assert await again.contains(key_of(0)) is not removed
                for number, length in list(enumerate(LENGTHS))[1:]:
                    assert await again.contains(key_of(number))
                    assert await holds(again, number, allocate, length), f"{length} bytes are lost"
                assert await again.count_prefix([key_of(number) for number in (1, 2, 99)]) == 2
                assert not await again.contains(key_of(99))

    async def test_what_a_persistent_tier_has_after_cancelled_puts_is_whole(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        tier.bind(arena)
        async with tier:
            for number in range(12):
                with record(arena, number) as buffer:
                    task = asyncio.ensure_future(tier.put(key_of(number), buffer))
                    for _ in range(number):
                        await asyncio.sleep(0)
                    task.cancel()
                    await in_time(asyncio.wait({task}))
        if not tier.capabilities.persistent:
            return
        again = self.reopen(tier)
        again.bind(arena)
        async with again:
            for number in range(12):
                there = await again.contains(key_of(number))
                assert await holds(again, number, allocate) is there
            await put(again, arena, range(12))
            assert all([await holds(again, number, allocate) for number in range(12)])

    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    async def test_closing_with_calls_in_flight_ends_them_and_gives_every_lease_back(
        self, tier: Tier, arena: Arena, allocate: Allocate, steps: int
    ) -> None:
        tier.bind(arena)
        await tier.__aenter__()
        await put(tier, arena, range(4))
        items = [(key_of(number), record(arena, number)) for number in range(4, 10)]
        calls: list[Coroutine[Any, Any, Any]] = [
            tier.put_many(items[:3]),
            tier.put(*items[3]),
            tier.get_many([key_of(number) for number in range(4)], allocate),
            tier.get(key_of(0), allocate),
            tier.remove(key_of(3)),
            tier.contains(key_of(1)),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        for _ in range(steps):
            await asyncio.sleep(0)
        await in_time(tier.__aexit__(None, None, None))
        await in_time(asyncio.wait(tasks))
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, TierError | BudgetExceededError), (
                f"a call during the closing raised {error!r}, not a TierError"
            )
            if not task.cancelled() and error is None:
                release_all(task.result())
        for _, buffer in items:
            buffer.release()
        assert arena.statistics().leased_slabs == 0, "closed, and leases are not back"
        if tier.capabilities.persistent:
            await self._check_whole(tier, arena, allocate)

    async def _check_whole(self, closed: Tier, arena: Arena, allocate: Allocate) -> None:
        again = self.reopen(closed)
        again.bind(arena)
        async with again:
            for number in range(10):
                there = await again.contains(key_of(number))
                assert await holds(again, number, allocate) is there
            assert all([await holds(again, number, allocate) for number in range(3)]), "lost by the closing"

    async def test_a_closed_tier_answers_with_tier_errors_or_rightly(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        tier.bind(arena)
        async with tier:
            await put(tier, arena, [1])
        buffer = record(arena, 2)
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: tier.put(key_of(2), buffer),
            lambda: tier.contains(key_of(1)),
            lambda: holds(tier, 1, allocate),
            lambda: tier.remove(key_of(5)),
        ]
        try:
            for call in calls:
                with contextlib.suppress(TierError):
                    assert await in_time(call()) in {None, True, False}
        finally:
            buffer.release()
        assert arena.statistics().leased_slabs == 0, "a closed tier keeps leases"

    async def test_an_error_within_the_block_closes_the_tier_and_is_not_swallowed(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        tier.bind(arena)

        async def fail() -> None:
            async with tier:
                await put(tier, arena, [1])
                raise LookupError("of this test")

        with pytest.raises(LookupError, match="of this test"):
            await fail()
        assert arena.statistics().leased_slabs == 0
        if tier.capabilities.persistent:
            again = self.reopen(tier)
            again.bind(arena)
            async with again:
                assert await holds(again, 1, allocate)

    async def test_the_tier_is_an_honest_async_context(self, tier: Tier, arena: Arena) -> None:
        tier.bind(arena)
        async with tier as entered:
            assert entered is tier
            await leases_are_back(tier, arena)
