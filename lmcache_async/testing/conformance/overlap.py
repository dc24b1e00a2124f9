"""Tests of concurrent calls on one key and on several."""

from __future__ import annotations

import asyncio
import random

from lmcache_async.memory.arena import Arena
from lmcache_async.testing.conformance.base import Cases, holds, in_time, leases_are_back, listed, put, record
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.base import Allocate, Tier


class OverlapCases(Cases):
    """Concurrent calls see no partial effect of each other."""

    async def test_puts_of_one_chunk_at_the_same_time_leave_one_whole_chunk(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await in_time(asyncio.gather(*(put(opened, arena, [1]) for _ in range(8))))

        assert await holds(opened, 1, allocate)
        assert opened.statistics().chunks in {0, 1}
        if opened.capabilities.lists:
            assert await listed(opened) == {key_of(1)}
        await leases_are_back(opened, arena)

    async def test_batches_of_the_same_chunks_at_the_same_time_store_each_once(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        batches = [[(key_of(number), record(arena, number)) for number in range(5)] for _ in range(3)]
        batches[1].reverse()
        answers = await in_time(asyncio.gather(*map(opened.put_many, batches)))
        for batch in batches:
            for _, buffer in batch:
                buffer.release()

        assert answers == [[None] * 5] * 3
        assert all([await holds(opened, number, allocate) for number in range(5)])
        assert opened.statistics().chunks in {0, 5}
        await leases_are_back(opened, arena)

    async def test_a_get_during_a_put_finds_all_or_nothing(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        for number in range(10):
            found = await in_time(
                asyncio.gather(
                    holds(opened, number, allocate),
                    put(opened, arena, [number]),
                    holds(opened, number, allocate),
                    opened.contains(key_of(number)),
                )
            )
            assert found[0] in {True, False}
            assert await holds(opened, number, allocate)
        await leases_are_back(opened, arena)

    async def test_a_get_during_a_removal_finds_all_or_nothing(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, range(10))
        for number in range(10):
            await in_time(
                asyncio.gather(
                    holds(opened, number, allocate),
                    opened.remove(key_of(number)),
                    holds(opened, number, allocate),
                )
            )
            assert await holds(opened, number, allocate) is not opened.capabilities.removes
        await leases_are_back(opened, arena)

    async def test_a_storm_of_calls_ends_and_every_answer_is_right(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        for seed in range(3):
            await in_time(_storm(random.Random(seed), opened, arena, allocate))

            for number in range(6):
                assert await opened.contains(key_of(number)) is await holds(opened, number, allocate)
        await leases_are_back(opened, arena)

    async def test_gets_and_puts_of_other_chunks_do_not_disturb_each_other(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, range(8))
        answers = await in_time(
            asyncio.gather(
                *(holds(opened, number, allocate) for number in range(8)),
                *(put(opened, arena, [number]) for number in range(8, 16)),
            )
        )

        assert answers[:8] == [True] * 8
        assert all([await holds(opened, number, allocate) for number in range(16)])
        await leases_are_back(opened, arena)


async def _storm(seeded: random.Random, tier: Tier, arena: Arena, allocate: Allocate) -> None:
    """Run eight tasks of ten random calls each on six keys. `holds` fails if a record is wrong."""

    async def call() -> None:
        for _ in range(10):
            number = seeded.randrange(6)
            match seeded.choice(("get", "get", "put", "put", "contains", "remove")):
                case "get":
                    await holds(tier, number, allocate)
                case "put":
                    await put(tier, arena, [number])
                case "contains":
                    await tier.contains(key_of(number))
                case _:
                    await tier.remove(key_of(number))

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(call())
