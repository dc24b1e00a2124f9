"""The cpu tier: the contract, and its use of the arena."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_async.errors import ConfigError, TierClosedError, TierFullError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.cpu import CPUConfig, CPUTier
from lmcache_async.testing.conformance import SuffixEvictionConformance, TierConformance
from lmcache_async.testing.records import SLAB_BYTES, check_record, key_of, record, small_arena


async def never(nbytes: int) -> Buffer:
    raise AssertionError(f"asked for {nbytes} bytes")


class TestCPUTier(TierConformance, SuffixEvictionConformance):
    many_keys = 500  # the suite's arena holds about forty

    @pytest.fixture
    def tier(self):
        return CPUTier(CPUConfig())

    async def test_put_and_get_share_one_slab(self, opened, arena):
        with record(arena, 1) as buffer:
            await opened.put(key_of(1), buffer)
            got = await opened.get(key_of(1), never)

            assert got is not None
            assert got.address == buffer.address
            assert arena.statistics().leased_slabs == 1
            got.release()

    async def test_other_threads_can_count_the_chunks_in_memory(self, opened, arena):
        with record(arena, 1) as buffer:
            await opened.put(key_of(1), buffer)

        keys = [key_of(1), key_of(2)]
        assert await asyncio.to_thread(opened.count_in_memory, keys) == 1
        await opened.remove(key_of(1))
        assert opened.count_in_memory(keys) == 0

    async def test_a_lookup_of_another_thread_counts_for_the_eviction(self, opened, arena):
        """The order of the chunks is known from it, and the time of their last use."""
        room, prompt = arena.num_slabs, [key_of(number) for number in range(4)]
        await asyncio.to_thread(opened.count_in_memory, prompt)
        for number in range(room):
            with record(arena, number) as buffer:
                await opened.put(key_of(number), buffer)
        await asyncio.to_thread(opened.count_in_memory, prompt)
        for number in range(room, 2 * room - 2):
            with record(arena, number) as buffer:
                await opened.put(key_of(number), buffer)

        assert opened.count_in_memory(prompt) == 2

    async def test_a_buffer_of_another_arena_is_copied(self, opened, arena, allocate):
        elsewhere = small_arena(1)
        with record(elsewhere, 1) as buffer:
            await opened.put(key_of(1), buffer)
            buffer.view[:] = bytes(buffer.nbytes)
        elsewhere.close()

        got = await opened.get(key_of(1), allocate)
        assert got is not None
        with got:
            check_record(got, 1)

    async def test_a_full_arena_takes_slabs_back_from_the_tier(self, opened, arena):
        for number in range(arena.num_slabs):
            with record(arena, number) as buffer:
                await opened.put(key_of(number), buffer)

        buffers = await arena.lease_many([100] * 5, timeout_s=0)

        assert len(buffers) == 5
        assert opened.statistics().evictions == 5
        assert not await opened.contains(key_of(4))
        assert await opened.contains(key_of(5))
        for buffer in buffers:
            buffer.release()

    async def test_a_leased_chunk_is_never_reclaimed(self, opened, arena):
        for number in range(arena.num_slabs):
            with record(arena, number) as buffer:
                await opened.put(key_of(number), buffer)
        held = await opened.get_many([key_of(number) for number in range(3)], never)

        taken = await arena.lease_many([1] * arena.num_slabs, timeout_s=0)

        assert len(taken) == arena.num_slabs - 3
        assert opened.statistics().chunks == 3
        assert arena.lease_nowait(1) is None
        for buffer in taken:
            buffer.release()
        for number, got in enumerate(held):
            assert isinstance(got, Buffer)
            check_record(got, number)
            got.release()

    async def test_the_prefix_of_a_chunk_in_use_is_evicted_as_a_last_resort(self, opened, arena):
        keys = [key_of(number) for number in range(arena.num_slabs)]
        await opened.contains_many(keys)  # one prompt
        for number in range(arena.num_slabs):
            with record(arena, number) as buffer:
                await opened.put(keys[number], buffer)
        [held] = await opened.get_many(keys[-1:], never)

        taken = await arena.lease_many([1] * (arena.num_slabs - 1), timeout_s=0)

        assert len(taken) == arena.num_slabs - 1
        for buffer in (*taken, held):
            assert isinstance(buffer, Buffer)
            buffer.release()

    async def test_the_end_of_a_lease_wakes_the_waiter_for_its_slab(self, opened, arena):
        filler = await arena.lease_many([1] * (arena.num_slabs - 1), timeout_s=0)
        buffer = record(arena, 1)
        await opened.put(key_of(1), buffer)
        waiter = asyncio.ensure_future(arena.lease(1, timeout_s=60))
        await asyncio.sleep(0)
        buffer.release()

        (await waiter).release()
        assert not await opened.contains(key_of(1))
        for lease in filler:
            lease.release()

    async def test_the_chunks_before_a_chunk_in_its_prompt_are_not_evicted_for_it(self, arena):
        tier = CPUTier(CPUConfig(max_bytes=2 * SLAB_BYTES))
        tier.bind(arena)
        async with tier:
            items = [(key_of(number), record(arena, number)) for number in range(3)]
            await tier.put_many(items[:2])
            for _, buffer in items[:2]:
                buffer.release()
            await tier.contains_many([key for key, _ in items])

            [result] = await tier.put_many(items[2:])
            items[2][1].release()

            assert isinstance(result, TierFullError)
            assert await tier.contains_many([key for key, _ in items]) == [True, True, False]
            assert tier.statistics().evictions == 0

    async def test_a_copy_finds_no_slab_in_a_full_arena(self, opened, arena):
        elsewhere = small_arena(1)
        filler = await arena.lease_many([1] * arena.num_slabs, timeout_s=0)
        with record(elsewhere, 1) as buffer, pytest.raises(TierFullError, match="no slab free"):
            await opened.put(key_of(1), buffer)
        assert not await opened.contains(key_of(1))
        for lease in filler:
            lease.release()
        elsewhere.close()

    async def test_no_call_yields_to_the_loop(self, opened, arena):
        items = [(key_of(number), record(arena, number)) for number in range(4)]
        keys = [key for key, _ in items]
        for call in (
            opened.put_many(items),
            opened.contains_many(keys),
            opened.count_prefix(keys),
            opened.remove(keys[0]),
        ):
            with pytest.raises(StopIteration):
                call.send(None)
        for _, buffer in items:
            buffer.release()


def test_a_limit_below_one_slab_is_a_config_error():
    arena = small_arena(2)

    with pytest.raises(ConfigError, match=str(SLAB_BYTES)):
        CPUTier(CPUConfig(max_bytes=SLAB_BYTES - 1)).bind(arena)
    arena.close()


async def test_a_tier_without_an_arena_does_not_open():
    with pytest.raises(TierClosedError, match="bind"):
        await CPUTier(CPUConfig()).__aenter__()
