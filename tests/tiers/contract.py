"""What every tier must do, as one test class: subclass it and say how to make the tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import pytest

from lmcache_async.errors import TierClosedError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.types import ChunkKey
from tests.tiers.records import SLAB_BYTES, check_record, key_of, record

# Payload lengths around pages and odd ones; the last fills a slab.
LENGTHS = (0, 1, 511, 4095, 4096, 4097, 12345, 64 * 1024)


class MakeTier(Protocol):
    def __call__(self, *, max_records: int | None = None) -> Tier:
        """A tier, not bound and not opened, with room for so many slabs' worth of records.

        A persistent one uses the same storage at each call.
        """


async def listed(tier: Tier) -> set[ChunkKey]:
    keys = [key async for key in tier.keys()]  # noqa: SIM118 - no dict
    assert len(set(keys)) == len(keys)
    return set(keys)


class TierContract:
    """The conformance suite. Override `make_tier`."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        raise NotImplementedError

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        arena = Arena(48 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
        yield arena
        statistics = arena.statistics()
        arena.close()
        assert statistics.leased_slabs == 0, "leases were not given back"

    @pytest.fixture
    def allocate(self, arena: Arena) -> Allocate:
        async def allocate(nbytes: int) -> Buffer:
            return await arena.lease(nbytes, timeout_s=5)

        return allocate

    @pytest.fixture
    async def tier(self, make_tier: MakeTier, arena: Arena) -> AsyncIterator[Tier]:
        tier = make_tier()
        tier.bind(arena)
        async with tier:
            yield tier

    async def test_a_chunk_of_any_length_comes_back_to_the_byte(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        for number, length in enumerate(LENGTHS):
            with record(arena, number, length) as buffer:
                await tier.put(key_of(number), buffer)
        for number, length in enumerate(LENGTHS):
            got = await tier.get(key_of(number), allocate)

            assert got is not None
            with got:
                check_record(got, number, length)

    async def test_what_was_never_put_is_a_miss(self, tier: Tier, allocate: Allocate) -> None:
        assert not await tier.contains(key_of(1))
        assert await tier.get(key_of(1), allocate) is None
        assert not await tier.remove(key_of(1))
        assert await tier.count_prefix([key_of(1)]) == 0

    async def test_put_does_not_keep_the_callers_lease(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        buffer = record(arena, 1)
        await tier.put(key_of(1), buffer)
        buffer.release()

        got = await tier.get(key_of(1), allocate)
        assert got is not None
        with got:
            check_record(got, 1)

    async def test_a_buffer_got_outlives_the_chunks_removal(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        with record(arena, 1) as buffer:
            await tier.put(key_of(1), buffer)
        got = await tier.get(key_of(1), allocate)
        assert got is not None
        await tier.remove(key_of(1))
        with record(arena, 2):  # takes the slab if somebody gave it back
            check_record(got, 1)
        got.release()

    async def test_putting_a_chunk_again_leaves_one_whole_chunk(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        for _ in range(2):
            with record(arena, 1) as buffer:
                await tier.put(key_of(1), buffer)

        assert tier.statistics().chunks in {0, 1}
        got = await tier.get(key_of(1), allocate)
        assert got is not None
        with got:
            check_record(got, 1)

    async def test_puts_of_one_chunk_at_the_same_time_leave_one_whole_chunk(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        buffers = [record(arena, 1) for _ in range(6)]
        await asyncio.gather(*(tier.put(key_of(1), buffer) for buffer in buffers))
        for buffer in buffers:
            buffer.release()

        got = await tier.get(key_of(1), allocate)
        assert got is not None
        with got:
            check_record(got, 1)
        if tier.capabilities.lists:
            assert await listed(tier) == {key_of(1)}

    async def test_batches_keep_their_order(self, tier: Tier, arena: Arena, allocate: Allocate) -> None:
        items = [(key_of(number), record(arena, number)) for number in range(8)]
        assert await tier.put_many(items) == [None] * 8
        for _, buffer in items:
            buffer.release()
        asked = [3, 99, 0, 7, 98]

        results = await tier.get_many([key_of(number) for number in asked], allocate)

        assert [isinstance(result, Buffer) for result in results] == [True, False, True, True, False]
        for number, result in zip(asked, results, strict=True):
            if isinstance(result, Buffer):
                check_record(result, number)
                result.release()
            else:
                assert result is None

    async def test_a_prefix_ends_at_the_first_hole(self, tier: Tier, arena: Arena) -> None:
        for number in (0, 1, 3):
            with record(arena, number) as buffer:
                await tier.put(key_of(number), buffer)
        keys = [key_of(number) for number in range(5)]

        assert await tier.count_prefix(keys) == 2
        assert await tier.count_prefix(keys[3:]) == 1
        assert await tier.count_prefix([]) == 0
        assert await tier.contains_many(keys) == [True, True, False, True, False]

    async def test_a_removed_chunk_is_gone_and_can_be_put_again(
        self, tier: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        if not tier.capabilities.removes:
            return
        with record(arena, 1) as buffer:
            await tier.put(key_of(1), buffer)
            assert await tier.remove(key_of(1))
            assert not await tier.contains(key_of(1))
            assert await tier.get(key_of(1), allocate) is None
            assert not await tier.remove(key_of(1))

            await tier.put(key_of(1), buffer)
        assert await tier.contains(key_of(1))

    async def test_keys_and_clear_speak_of_what_is_there(self, tier: Tier, arena: Arena) -> None:
        if not (tier.capabilities.lists and tier.capabilities.removes):
            return
        for number in range(5):
            with record(arena, number) as buffer:
                await tier.put(key_of(number), buffer)

        assert await listed(tier) == {key_of(number) for number in range(5)}
        assert tier.statistics().chunks == 5
        assert await tier.clear() == 5
        assert await listed(tier) == set()
        assert tier.statistics().chunks == 0
        assert tier.statistics().bytes == 0

    async def test_a_full_tier_stays_within_its_limit_and_keeps_what_is_newest(
        self, make_tier: MakeTier, arena: Arena, allocate: Allocate
    ) -> None:
        tier = make_tier(max_records=4)
        tier.bind(arena)
        async with tier:
            max_bytes = tier.statistics().max_bytes
            if max_bytes is None:
                return
            for number in range(12):
                with record(arena, number, 64 * 1024) as buffer:
                    await tier.put(key_of(number), buffer)
                assert tier.statistics().bytes <= max_bytes

            held = [number for number in range(12) if await tier.contains(key_of(number))]
            assert held == [8, 9, 10, 11]
            assert tier.statistics().evictions == 8
            for number in held:
                got = await tier.get(key_of(number), allocate)
                assert got is not None
                with got:
                    check_record(got, number, 64 * 1024)

    async def test_a_full_tier_gives_up_suffixes_before_their_prefixes(
        self, make_tier: MakeTier, arena: Arena
    ) -> None:
        tier = make_tier(max_records=6)
        tier.bind(arena)
        async with tier:
            if tier.statistics().max_bytes is None:
                return
            old = [key_of(number) for number in range(4)]
            await tier.contains_many(old)
            for number in range(4):  # one by one, so the first is the oldest
                with record(arena, number, 64 * 1024) as buffer:
                    await tier.put(key_of(number), buffer)
            for number in range(10, 14):
                with record(arena, number, 64 * 1024) as buffer:
                    await tier.put(key_of(number), buffer)

            assert await tier.contains_many(old) == [True, True, False, False]

    async def test_many_puts_at_once_into_a_small_tier_end_within_its_limit(
        self, make_tier: MakeTier, arena: Arena
    ) -> None:
        tier = make_tier(max_records=3)
        tier.bind(arena)
        async with tier:
            max_bytes = tier.statistics().max_bytes
            if max_bytes is None:
                return
            items = [(key_of(number), record(arena, number, 64 * 1024)) for number in range(16)]
            halves = await asyncio.gather(tier.put_many(items[:8]), tier.put_many(items[8:]))
            for _, buffer in items:
                buffer.release()

            results = [*halves[0], *halves[1]]
            assert all(result is None or isinstance(result, TierError) for result in results)
            assert None in results
            assert 0 < tier.statistics().bytes <= max_bytes
            with record(arena, 50, 64 * 1024) as buffer:
                await tier.put(key_of(50), buffer)  # room comes back
            assert await tier.contains(key_of(50))

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
    @pytest.mark.parametrize("verb", ["put", "put_many", "get", "get_many", "remove"])
    async def test_a_cancelled_call_leaves_the_tier_whole_and_no_lease(
        self, tier: Tier, arena: Arena, allocate: Allocate, verb: str, steps: int
    ) -> None:
        keys = [key_of(number) for number in range(6)]
        items = [(key, record(arena, number)) for number, key in enumerate(keys)]
        if verb in {"get", "get_many", "remove"}:
            await tier.put_many(items)
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: tier.put(*items[0]),
            "put_many": lambda: tier.put_many(items),
            "get": lambda: tier.get(keys[0], allocate),
            "get_many": lambda: tier.get_many(keys, allocate),
            "remove": lambda: tier.remove(keys[0]),
        }
        task = asyncio.ensure_future(calls[verb]())  # type: ignore[arg-type]
        for _ in range(steps):
            await asyncio.sleep(0)  # a step of the loop, no time
        task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        for got in result if isinstance(result, list) else [result]:
            if isinstance(got, Buffer):
                got.release()

        for _, buffer in items:  # it reads them no more: other content may go in
            buffer.view[:] = bytes(buffer.nbytes)
            buffer.release()
        for number, key in enumerate(keys):
            got_after = await tier.get(key, allocate)
            assert not isinstance(got_after, TierError)
            if got_after is not None:
                with got_after:
                    if not tier.capabilities.in_arena:  # there the zeros went into the chunk itself
                        check_record(got_after, number)
        for number, key in enumerate(keys):
            with record(arena, number) as buffer:
                await tier.remove(key)
                await tier.put(key, buffer)
        assert await tier.count_prefix(keys) == 6

    async def test_a_persistent_tier_has_its_chunks_after_it_was_reopened(
        self, make_tier: MakeTier, arena: Arena, allocate: Allocate
    ) -> None:
        first = make_tier()
        if not first.capabilities.persistent:
            return
        first.bind(arena)
        async with first:
            for number, length in enumerate(LENGTHS):
                with record(arena, number, length) as buffer:
                    await first.put(key_of(number), buffer)
            await first.remove(key_of(0))
            before = first.statistics()
        second = make_tier()
        second.bind(arena)
        async with second:
            assert second.statistics().bytes == before.bytes
            assert second.statistics().chunks == before.chunks
            assert not await second.contains(key_of(0))
            for number, length in list(enumerate(LENGTHS))[1:]:
                got = await second.get(key_of(number), allocate)
                assert got is not None
                with got:
                    check_record(got, number, length)

    async def test_a_tier_that_is_not_open_says_so(
        self, make_tier: MakeTier, arena: Arena, allocate: Allocate
    ) -> None:
        tier = make_tier()
        tier.bind(arena)
        with record(arena, 1) as buffer:
            with pytest.raises(TierClosedError):
                await tier.put(key_of(1), buffer)
            async with tier:
                await tier.put(key_of(1), buffer)
            with pytest.raises(TierClosedError):
                await tier.put(key_of(1), buffer)
        with pytest.raises(TierClosedError):
            await tier.get(key_of(1), allocate)
