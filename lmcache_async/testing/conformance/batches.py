"""Tests of batches, prefixes, listing and removal."""

from __future__ import annotations

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance.base import (
    Cases,
    holds,
    leases_are_back,
    listed,
    put,
    record,
    release_all,
    scribble,
)
from lmcache_async.testing.records import check_record, key_of
from lmcache_async.tiers.base import Allocate, Tier, TierStatistics


class BatchCases(Cases):
    """Batch methods return one result for each key, in order."""

    async def test_batches_keep_their_order(self, opened: Tier, arena: Arena, allocate: Allocate) -> None:
        items = [(key_of(number), record(arena, number)) for number in range(8)]
        assert await opened.put_many(items) == [None] * 8
        for _, buffer in items:
            buffer.release()
        scribble(arena)
        asked = [3, 99, 0, 7, 98, 1, 2, 6, 5, 4]

        results = await opened.get_many([key_of(number) for number in asked], allocate)

        assert len(results) == len(asked)
        for number, result in zip(asked, results, strict=True):
            if number < 8:
                assert isinstance(result, Buffer), f"chunk {number} of a batch is lost"
                check_record(result, number)
                result.release()
            else:
                assert result is None
        await leases_are_back(opened, arena)

    async def test_an_empty_batch_is_an_empty_answer(self, opened: Tier, allocate: Allocate) -> None:
        assert await opened.put_many([]) == []
        assert await opened.get_many([], allocate) == []
        assert await opened.contains_many([]) == []
        assert await opened.count_prefix([]) == 0

    async def test_a_key_may_come_twice_in_a_batch(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        items = [(key_of(number), record(arena, number)) for number in (1, 2, 1)]
        assert await opened.put_many(items) == [None] * 3
        for _, buffer in items:
            buffer.release()

        results = await opened.get_many([key_of(number) for number in (2, 1, 2)], allocate)
        for number, result in zip((2, 1, 2), results, strict=True):
            assert isinstance(result, Buffer)
            check_record(result, number)
        release_all(results)
        await leases_are_back(opened, arena)

    async def test_a_batch_may_be_longer_than_what_moves_at_once(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        count = arena.num_slabs // 2
        items = [(key_of(number), record(arena, number, 100)) for number in range(count)]
        assert await opened.put_many(items) == [None] * count
        for _, buffer in items:
            buffer.release()

        results = await opened.get_many([key_of(number) for number in range(count)], allocate)
        for number, result in enumerate(results):
            assert isinstance(result, Buffer)
            check_record(result, number, 100)
        release_all(results)
        await leases_are_back(opened, arena)

    async def test_a_batch_that_finds_memory_for_some_brings_those(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, range(6))
        left = iter(range(3))

        async def scarce(nbytes: int) -> Buffer:
            if next(left, None) is None:
                raise BudgetExceededError("no memory left for this test")
            return await allocate(nbytes)

        results = await opened.get_many([key_of(number) for number in range(6)], scarce)

        assert len(results) == 6
        for number, result in enumerate(results):
            assert result is None or isinstance(result, Buffer | TierError)
            if isinstance(result, Buffer):
                check_record(result, number)
        release_all(results)
        await leases_are_back(opened, arena)
        assert await holds(opened, 5, allocate)

    async def test_a_prefix_ends_at_the_first_hole(self, opened: Tier, arena: Arena) -> None:
        await put(opened, arena, (0, 1, 3))
        keys = [key_of(number) for number in range(5)]

        assert await opened.count_prefix(keys) == 2
        assert await opened.count_prefix(keys[3:]) == 1
        assert await opened.count_prefix(keys[:2]) == 2
        assert await opened.contains_many(keys) == [True, True, False, True, False]


class RemovalCases(Cases):
    """`remove`, `keys`, `clear` and `statistics` agree, as far as the capabilities declare them."""

    async def test_a_removed_chunk_is_gone_and_can_be_put_again(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, [1, 2])
        if not opened.capabilities.removes:
            assert not await opened.remove(key_of(1)), "remove says that it did what is not declared"
            assert await holds(opened, 1, allocate)
            return
        for _ in range(2):
            assert await opened.remove(key_of(1))
            assert not await opened.contains(key_of(1))
            assert await opened.get(key_of(1), allocate) is None
            assert not await opened.remove(key_of(1))
            await put(opened, arena, [1])
            assert await holds(opened, 1, allocate)
        assert await holds(opened, 2, allocate)
        await leases_are_back(opened, arena)

    async def test_a_rejected_chunk_is_never_given_again(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, [1, 2])
        assert await opened.reject(key_of(1), "checksum") is opened.capabilities.removes
        assert not await opened.reject(key_of(9), "checksum")
        if opened.capabilities.removes:
            assert not await opened.contains(key_of(1))
            assert await opened.get(key_of(1), allocate) is None
            await put(opened, arena, [1])
            assert await holds(opened, 1, allocate)
        assert await holds(opened, 2, allocate)
        await leases_are_back(opened, arena)

    async def test_keys_and_clear_speak_of_what_is_there(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, range(5))
        if not opened.capabilities.lists:
            assert await listed(opened) == set(), "keys gives some, and `lists` is not declared"
            return
        assert await listed(opened) == {key_of(number) for number in range(5)}
        if not opened.capabilities.removes:
            return
        await opened.remove(key_of(3))
        assert await listed(opened) == {key_of(number) for number in (0, 1, 2, 4)}
        assert await opened.clear() == 4
        assert await listed(opened) == set()
        assert await opened.clear() == 0
        assert not await holds(opened, 1, allocate)
        await put(opened, arena, [1])
        assert await holds(opened, 1, allocate)
        await leases_are_back(opened, arena)

    async def test_statistics_count_what_is_there(self, opened: Tier, arena: Arena) -> None:
        assert (opened.statistics().chunks, opened.statistics().bytes) == (0, 0)
        await put(opened, arena, range(4))
        statistics = opened.statistics()
        if statistics == TierStatistics():
            return  # the tier has no statistics
        assert statistics.chunks == 4
        assert statistics.bytes > 0
        assert (statistics.evictions, statistics.corrupt) == (0, 0)
        if opened.capabilities.removes:
            for number in range(4):
                await opened.remove(key_of(number))
            assert (opened.statistics().chunks, opened.statistics().bytes) == (0, 0)
