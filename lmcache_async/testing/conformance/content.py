"""Tests of content: a record is returned unchanged, only for its own key, in memory that the caller owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance.base import ARENA_SLABS, Cases, TierRig, opened_rig, release_all
from lmcache_async.testing.records import (
    MAX_PAYLOAD_BYTES,
    ODD_KEYS,
    check_record,
    is_proven,
    key_of,
    record,
    record_bytes_of,
)
from lmcache_async.tiers.base import Tier, TierStatistics
from lmcache_async.tiers.results import check_flag, type_text

LENGTHS = (
    *(0, 1, 2, 3, 5, 7, 13, 63, 64, 65, 511, 512, 513, 1000),
    *(4095, 4096, 4097, 8191, 8192, 8193, 12345, 20_000, 32_767, 32_768, 65_535, MAX_PAYLOAD_BYTES),
)
"""Payload lengths around words, sectors and pages, and odd ones. The last fills a slab."""

EDITS: dict[str, Callable[[bytes], bytes]] = {
    "first byte flipped": lambda content: _flipped(content, 0),
    "header flipped": lambda content: _flipped(content, 100),
    "payload flipped": lambda content: _flipped(content, len(content) // 2 + 1),
    "last byte flipped": lambda content: _flipped(content, len(content) - 1),
    "last byte cut": lambda content: content[:-1],
    "cut to a page": lambda content: content[:4096],
    "cut in half": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "longer": lambda content: content + bytes(4096),
    "zeros": lambda content: bytes(len(content)),
    "first half zeros": lambda content: bytes(len(content) // 2) + content[len(content) // 2 :],
    "record of another chunk": lambda _: record_bytes_of(1 << 40, 5000),
}


class ContentCases(Cases):
    """Tests of one record at a time."""

    @pytest.mark.parametrize(
        ("numbers", "length"),
        [
            (range(len(LENGTHS)), LENGTHS.__getitem__),
            ([int.from_bytes(key, "big") for key in ODD_KEYS], lambda _: 5000),
        ],
        ids=["any length", "any sixteen bytes as a key"],
    )
    async def test_a_record_is_returned_unchanged_for_its_key(
        self, rig: TierRig, numbers: Sequence[int], length: Callable[[int], int]
    ) -> None:
        rig.length = length
        for number in numbers:
            await rig.put(number)
            assert await rig.contains(number), f"contains does not find a record of {length(number)} bytes"

        for number in numbers:
            assert await rig.holds(number), (
                f"the record of key {key_of(number)!r}, of {length(number)} bytes, is lost"
            )
        if rig.tier.capabilities.lists:
            assert await rig.keys() == {key_of(number) for number in numbers}

    async def test_a_chunk_that_was_never_put_is_a_miss(self, rig: TierRig) -> None:
        await rig.put(2)

        assert not await rig.contains(1), "contains found a chunk that was never put"
        assert not await rig.holds(1), "get returned a chunk that was never put"
        assert not await rig.remove(1), "remove returned True for a chunk that was never put"
        assert await rig.tier.count_prefix([key_of(1)]) == 0, "count_prefix found a chunk that was never put"

    @pytest.mark.parametrize("verb", ["put", "put_many"])
    async def test_put_does_not_change_the_callers_buffer_or_lease(self, rig: TierRig, verb: str) -> None:
        with rig.items([1]) as items:
            [(key, buffer)] = items
            content = bytes(buffer.view)
            if verb == "put":
                await rig.tier.put(key, buffer)
            else:
                assert await rig.tier.put_many(items) == [None], (
                    "put_many did not return None for a stored chunk"
                )

            assert not buffer.released, f"{verb} released the caller's lease"
            assert bytes(buffer.view) == content, f"{verb} changed the caller's bytes"
        await rig.check_leases()
        rig.overwrite_free_memory()
        await rig.check_stored(1)

    @pytest.mark.parametrize("verb", ["put", "put_many"])
    async def test_a_tier_outside_the_arena_does_not_keep_the_callers_memory(
        self, rig: TierRig, verb: str
    ) -> None:
        if rig.tier.capabilities.in_arena:
            return
        # This put starts the threads of the tier: a thread that is started during a put may run at once.
        await rig.put(0)
        numbers = range(1, 9)
        items = [(key_of(number), record(rig.arena, number)) for number in numbers]
        try:
            for group in [items] if verb == "put_many" else [[item] for item in items]:
                if verb == "put_many":
                    await rig.tier.put_many(group)
                else:
                    await rig.tier.put(*group[0])
                # No await since the put, so a thread that reads the memory later finds zeros.
                for _, buffer in group:
                    assert not buffer.shared, f"the tier has a lease of the caller's memory after {verb}"
                    buffer.view[:] = bytes(buffer.nbytes)
        finally:
            release_all([buffer for _, buffer in items])

        assert await rig.holds(*numbers), f"{verb} has ended, but a chunk is not stored"

    async def test_returned_buffers_belong_to_the_caller(self, rig: TierRig) -> None:
        await rig.put(1)
        first, second = [await rig.get(1) for _ in range(2)]
        assert first is not None
        assert second is not None
        of_arena = 0 <= first.address - rig.arena.address < len(rig.arena.region)
        if rig.tier.capabilities.own_memory:
            assert not of_arena, "own_memory is declared, but the buffer is from allocate"
            assert first.shared, "own_memory is declared, but the buffer is not marked as shared"
        else:
            assert of_arena, "the buffer is not from allocate"
        if not rig.leases_content:  # otherwise both are leases of one chunk
            assert not first.shared, "a buffer from allocate has a second lease"
            first.view[:] = bytes(first.nbytes)
        first.release()
        await rig.check_stored(1)
        for number in (2, 3, 4):
            await rig.put(number)
            await rig.check_stored(number)
        await rig.remove(1)
        rig.overwrite_free_memory()

        check_record(second, 1)
        second.release()

    async def test_putting_a_chunk_again_leaves_one_whole_chunk(self, rig: TierRig) -> None:
        await rig.put(1)
        size = rig.statistics.bytes
        for _ in range(3):
            await rig.put(1)
            assert await rig.contains(1)
            await rig.check_stored(1)

        assert rig.statistics.chunks in {0, 1}, "a chunk that was put again is counted twice"
        assert rig.statistics.bytes == size, "a second put of a chunk is counted twice"

    async def test_each_of_many_records_is_found_by_its_own_key(self, rig: TierRig) -> None:
        rig.length = lambda number: number % 50
        batch = 32
        for start in range(0, self.many_keys, batch):
            answers = await rig.put_many(range(start, min(start + batch, self.many_keys)))
            refused = [error for error in answers if error is not None]
            assert not refused or rig.statistics.max_bytes is not None, refused[0]
        asked = range(0, self.many_keys, 7)
        found = [number for number in asked if await rig.holds(number)]

        if not rig.statistics.evictions:
            assert found == list(asked), "records are lost, but statistics() counts no evictions"
        assert found, "all records are lost"
        assert not await rig.contains(self.many_keys), "contains found a chunk that was never put"


class BatchCases(Cases):
    """Batch methods return one result for each key, in order."""

    @pytest.mark.parametrize(
        ("puts", "asked"),
        [
            (range(8), [3, 99, 0, 7, 98, 1, 2, 6, 5, 4]),
            ((1, 2, 1), (2, 1, 2)),
            (range(ARENA_SLABS // 2), range(ARENA_SLABS // 2)),
        ],
        ids=["missing keys", "repeated keys", "more than max_concurrency"],
    )
    async def test_batches_of_any_size_keep_their_order(
        self, rig: TierRig, puts: Sequence[int], asked: Sequence[int]
    ) -> None:
        assert await rig.put_many(puts) == [None] * len(puts)
        rig.overwrite_free_memory()
        found = await rig.tier.contains_many([key_of(number) for number in asked])
        assert found == [number in puts for number in asked], "contains_many is wrong for a batch"

        results = await rig.get_many(asked)

        missing = [number not in puts for number in asked]
        assert [result is None for result in results] == missing, (
            "get_many did not return None exactly for the missing chunks"
        )
        _check_got(rig, asked, results)

    async def test_an_empty_batch_has_an_empty_result(self, rig: TierRig) -> None:
        assert await rig.put_many([]) == []
        assert await rig.get_many([]) == []
        assert await rig.tier.contains_many([]) == []
        assert await rig.tier.count_prefix([]) == 0

    async def test_without_memory_for_all_chunks_a_batch_returns_some_and_a_get_raises(
        self, rig: TierRig
    ) -> None:
        left = iter(range(3))

        async def scarce(nbytes: int) -> Buffer:
            if next(left, None) is None:
                raise BudgetExceededError("no memory left for this test")
            return await rig.allocate(nbytes)

        await rig.put(*range(6))
        _check_got(rig, range(6), await rig.get_many(range(6), scarce))
        if not rig.leases_content:  # otherwise `allocate` is not called
            with pytest.raises((BudgetExceededError, TierError)):
                await rig.tier.get(key_of(1), scarce)
        await rig.check_stored(*range(6))

    async def test_a_prefix_ends_at_the_first_missing_chunk(self, rig: TierRig) -> None:
        await rig.put(0, 1, 3)
        keys = [key_of(number) for number in range(5)]

        assert await rig.tier.count_prefix(keys) == 2, "count_prefix did not stop at the first missing chunk"
        assert await rig.tier.count_prefix(keys[3:]) == 1
        assert await rig.tier.count_prefix(keys[:2]) == 2


def _check_got(rig: TierRig, numbers: Sequence[int], results: Sequence[Buffer | TierError | None]) -> None:
    """Assert that each buffer in the result of a batch is right, and release it."""
    for number, result in zip(numbers, results, strict=True):
        assert result is None or isinstance(result, Buffer | TierError), (
            f"get_many returned {type_text(result)} for a chunk"
        )
        if isinstance(result, Buffer):
            check_record(result, number, rig.length(number))
    release_all(results)


class RemovalCases(Cases):
    """`remove`, `keys`, `clear` and `statistics` agree, as far as the capabilities declare them."""

    @pytest.mark.parametrize("verb", ["remove", "reject"])
    async def test_a_removed_or_rejected_chunk_is_gone_and_can_be_put_again(
        self, rig: TierRig, verb: str
    ) -> None:
        async def remove(number: int) -> bool:
            if verb == "remove":
                return await rig.remove(number)
            return check_flag("reject", await rig.tier.reject(key_of(number), "checksum"))

        async def check_found(found: list[bool]) -> None:
            keys = [key_of(1), key_of(2)]
            assert await rig.tier.contains_many(keys) == found, f"contains_many is wrong after a {verb}"
            assert await rig.tier.count_prefix(keys) == [*found, False].index(False)
            results = await rig.get_many([1, 2])
            assert [isinstance(result, Buffer) for result in results] == found, (
                f"get_many is wrong after a {verb}"
            )
            _check_got(rig, [1, 2], results)

        removes = rig.tier.capabilities.removes
        await rig.put(1, 2)
        for _ in range(2):
            await check_found([True, True])
            assert await remove(1) is removes, (
                f"{verb} of a stored chunk did not return {removes}, the declared `removes`"
            )
            assert not await remove(9), f"{verb} returned True for a chunk that was never put"
            assert await rig.contains(1) is not removes
            assert await rig.holds(1) is not removes
            await check_found([not removes, True])
            if removes:
                assert not await remove(1), f"{verb} returned True for a chunk that it had removed"
                await rig.put(1)
                await rig.check_stored(1)
        await rig.check_stored(2)

    async def test_keys_and_clear_agree_with_the_content(self, rig: TierRig) -> None:
        await rig.put(*range(5))
        if not rig.tier.capabilities.lists:
            assert await rig.keys() == set(), "keys returned keys, but `lists` is not declared"
            return
        stored = {key_of(number) for number in range(5)}
        assert await rig.keys() == stored, "keys did not yield exactly the stored chunks"
        if not rig.tier.capabilities.removes:
            return
        await rig.remove(3)
        assert await rig.keys() == {key_of(number) for number in (0, 1, 2, 4)}
        await rig.check_stored(0, 1, 2, 4)
        assert await rig.tier.clear() == 4, "clear did not return the number of removed chunks"
        assert await rig.keys() == set()
        assert await rig.tier.clear() == 0
        assert not await rig.contains(1), "contains found a chunk after clear"
        assert not await rig.holds(1), "get returned a chunk after clear"
        await rig.put(1)
        await rig.check_stored(1)

    async def test_statistics_agree_with_the_content(self, rig: TierRig) -> None:
        counts = (rig.statistics.chunks, rig.statistics.bytes)
        assert counts == (0, 0), "statistics() of a new tier counts chunks or bytes"
        await rig.put(*range(4))
        statistics = rig.statistics
        if statistics == TierStatistics():
            return  # the tier has no statistics
        assert statistics.chunks == 4, "statistics().chunks is not the number of stored chunks"
        assert statistics.bytes > 0
        assert (statistics.evictions, statistics.corrupt) == (0, 0)
        if rig.tier.capabilities.removes:
            for number in range(4):
                await rig.remove(number)
            assert (rig.statistics.chunks, rig.statistics.bytes) == (0, 0)


class DamageCases(Cases):
    """Damaged content is a miss, an error, or a record that fails verification.

    The tests apply if the test class overrides `damage`.
    """

    @pytest.mark.parametrize("edit", EDITS)
    async def test_damaged_content_fails_verification(self, rig: TierRig, edit: str) -> None:
        await rig.put(1, 2)
        if not await self.damage(rig.tier, key_of(1), EDITS[edit]):
            await rig.check_stored(1)
            return
        await _get_damaged(rig)
        await rig.check_leases()
        assert await rig.holds(2), "damage of one chunk removed another one"
        await rig.remove(1)  # as the framework does with a corrupt record
        if rig.tier.capabilities.removes:
            await rig.put(1)
            assert await rig.holds(1), "a damaged chunk cannot be stored again"

    @pytest.mark.parametrize("edit", EDITS)
    async def test_a_persistent_tier_opens_over_damaged_content(
        self, tier: Tier, arena: Arena, edit: str
    ) -> None:
        async with opened_rig(tier, arena) as rig:
            await rig.put(1, 2)
            if not (tier.capabilities.persistent and await self.damage(tier, key_of(1), EDITS[edit])):
                await rig.check_stored(2)
                return
        async with opened_rig(self.reopen(tier), arena) as again:
            await _get_damaged(again)
            await again.check_stored(2)
            await again.check_leases()

    async def test_a_scrub_rejects_only_damaged_records(self, rig: TierRig) -> None:
        await rig.put(*range(4))
        clean = await rig.tier.scrub()
        assert not clean.corrupt, f"a scrub reports intact records as corrupt: {clean.corrupt}"
        assert clean.chunks in {0, 4}
        if await self.damage(rig.tier, key_of(1), EDITS["payload flipped"]):
            report = await rig.tier.scrub()
            assert sum(report.corrupt.values()) == bool(clean.chunks)
            if clean.chunks:
                assert not await rig.holds(1)
        await rig.check_stored(0, 2, 3)


async def _get_damaged(rig: TierRig) -> None:
    """Get chunk 1, alone and in a batch, and assert that each record that passes verification is right."""
    results = [*await rig.get_many([1, 2])]
    try:
        results.append(await rig.tier.get(key_of(1), rig.allocate))
    except TierError as error:
        results.append(error)
    for number, result in zip((1, 2, 1), results, strict=True):
        if isinstance(result, Buffer):
            with result:
                if is_proven(result, number):
                    check_record(result, number)


def _flipped(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 0x10
    return bytes(changed)
