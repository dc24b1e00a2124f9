"""Tests of content: a record is returned unchanged, only for its own key, in memory that the caller owns."""

from __future__ import annotations

import pytest

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance.base import (
    Cases,
    holds,
    leases_are_back,
    leases_content,
    listed,
    put,
    record,
    scribble,
)
from lmcache_async.testing.records import MAX_PAYLOAD_BYTES, check_record, key_of
from lmcache_async.testing.records import record as writable_record
from lmcache_async.tiers.base import Allocate, Tier

LENGTHS = (
    *(0, 1, 2, 3, 5, 7, 13, 63, 64, 65, 511, 512, 513, 1000),
    *(4095, 4096, 4097, 8191, 8192, 8193, 12345, 20_000, 32_767, 32_768, 65_535, MAX_PAYLOAD_BYTES),
)
"""Payload lengths around words, sectors and pages, and odd ones. The last fills a slab."""

ODD_KEYS = (bytes(16), b"\xff" * 16, b"../../etc/passwd", b"a/b\n\r\t \"'*?;&|\x00%", b"con.aux.nul..  .")


class ContentCases(Cases):
    """Tests of one record at a time."""

    async def test_a_record_of_any_length_comes_back_to_the_byte(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        for number, length in enumerate(LENGTHS):
            await put(opened, arena, [number], length)
            assert await opened.contains(key_of(number))
        for number, length in enumerate(LENGTHS):
            assert await holds(opened, number, allocate, length), f"a record of {length} bytes is lost"
        await leases_are_back(opened, arena)

    async def test_any_sixteen_bytes_are_a_key(self, opened: Tier, arena: Arena, allocate: Allocate) -> None:
        numbers = [int.from_bytes(key, "big") for key in ODD_KEYS]
        await put(opened, arena, numbers)

        for number in numbers:
            assert await holds(opened, number, allocate), f"the record of key {key_of(number)!r} is lost"
        if opened.capabilities.lists:
            assert await listed(opened) == {key_of(number) for number in numbers}

    async def test_what_was_never_put_is_a_miss(self, opened: Tier, arena: Arena, allocate: Allocate) -> None:
        await put(opened, arena, [2])

        assert not await opened.contains(key_of(1))
        assert await opened.get(key_of(1), allocate) is None
        assert not await opened.remove(key_of(1))
        assert await opened.count_prefix([key_of(1)]) == 0

    async def test_put_leaves_the_callers_buffer_and_lease_alone(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        for verb in ("put", "put_many"):
            buffer = record(arena, 1)
            content = bytes(buffer.view)
            if verb == "put":
                await opened.put(key_of(1), buffer)
            else:
                assert await opened.put_many([(key_of(1), buffer)]) == [None]

            assert not buffer.released, f"{verb} released the caller's lease"
            assert bytes(buffer.view) == content, f"{verb} changed the caller's bytes"
            buffer.release()
            await leases_are_back(opened, arena)
            scribble(arena)
            assert await holds(opened, 1, allocate)

    async def test_what_a_tier_outside_the_arena_keeps_does_not_follow_the_callers_buffer(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        if opened.capabilities.in_arena:
            return
        with writable_record(arena, 1) as buffer:
            await opened.put(key_of(1), buffer)
            assert not buffer.shared, "put has ended, and the tier holds a lease of the caller's memory"
            buffer.view[:] = bytes(buffer.nbytes)

        assert await holds(opened, 1, allocate)

    async def test_a_buffer_got_is_the_callers_and_stays_right(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, [1, 2])
        got = await opened.get(key_of(1), allocate)
        assert got is not None
        of_arena = 0 <= got.address - arena.address < len(arena.region)
        if opened.capabilities.own_memory:
            assert not of_arena, "the buffer is of allocate's, and own_memory says that it is not"
            assert got.shared, "others read this memory, and the buffer says that it is the caller's alone"
        else:
            assert of_arena, "the buffer is not of allocate's"
        for number in (2, 3, 4):
            await put(opened, arena, [number])
            assert await holds(opened, number, allocate)
        await opened.remove(key_of(1))
        scribble(arena)
        check_record(got, 1)
        got.release()
        await leases_are_back(opened, arena)

    async def test_two_buffers_of_one_chunk_are_independent(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, [1])
        first = await opened.get(key_of(1), allocate)
        second = await opened.get(key_of(1), allocate)
        assert first is not None
        assert second is not None
        if not leases_content(opened):  # otherwise both are leases of one chunk
            assert not first.shared, "a buffer of allocate's has a second lease"
            first.view[:] = bytes(first.nbytes)
        first.release()

        check_record(second, 1)
        second.release()
        assert await holds(opened, 1, allocate)
        await leases_are_back(opened, arena)

    async def test_putting_a_chunk_again_leaves_one_whole_chunk(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, [1])
        size = opened.statistics().bytes
        for _ in range(3):
            await put(opened, arena, [1])
            assert await opened.contains(key_of(1))
            assert await holds(opened, 1, allocate)

        assert opened.statistics().chunks in {0, 1}
        assert opened.statistics().bytes == size, "a second put of a chunk is counted again"
        await leases_are_back(opened, arena)

    async def test_a_get_without_memory_raises_and_harms_nothing(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        async def refuse(nbytes: int) -> Buffer:
            raise BudgetExceededError(f"no {nbytes} bytes for this test")

        await put(opened, arena, [1])
        if not leases_content(opened):  # otherwise `allocate` is not called
            with pytest.raises((BudgetExceededError, TierError)):
                await opened.get(key_of(1), refuse)
        await leases_are_back(opened, arena)
        assert await holds(opened, 1, allocate)

    async def test_a_tier_of_many_keys_mixes_none_of_them_up(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        batch = 32
        for start in range(0, self.many_keys, batch):
            numbers = range(start, min(start + batch, self.many_keys))
            items = [(key_of(number), record(arena, number, number % 50)) for number in numbers]
            refused = [error for error in await opened.put_many(items) if error is not None]
            for _, buffer in items:
                buffer.release()
            assert not refused or opened.statistics().max_bytes is not None, refused[0]
        asked = range(0, self.many_keys, 7)
        found = [number for number in asked if await holds(opened, number, allocate, number % 50)]

        if not opened.statistics().evictions:
            assert found == list(asked)
        assert found, "all records are lost"
        assert not await opened.contains(key_of(self.many_keys))
        if opened.capabilities.lists:
            held = await listed(opened)
            assert held >= {key_of(number) for number in found}
            assert opened.statistics().chunks in {0, len(held)}
        await leases_are_back(opened, arena)
