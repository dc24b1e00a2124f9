"""Tests of records that the backend lost or changed. They apply if the test class overrides `damage`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.testing.conformance.base import Cases, holds, leases_are_back, put
from lmcache_async.testing.records import check_record, is_proven, key_of, record
from lmcache_async.tiers.base import Allocate, Tier

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
}


class DamageCases(Cases):
    """Damaged content is a miss, an error, or a record that fails verification."""

    @pytest.mark.parametrize("edit", EDITS)
    async def test_damaged_content_is_never_taken_for_right(
        self, opened: Tier, arena: Arena, allocate: Allocate, edit: str
    ) -> None:
        await put(opened, arena, [1, 2])
        if not await self.damage(opened, key_of(1), EDITS[edit]):
            assert await holds(opened, 1, allocate)
            return
        await _get_damaged(opened, allocate)
        await leases_are_back(opened, arena)
        assert await holds(opened, 2, allocate), "damage of one chunk has cost another"
        await opened.remove(key_of(1))  # as the framework does with a corrupt record
        if opened.capabilities.removes:
            await put(opened, arena, [1])
            assert await holds(opened, 1, allocate), "what was damaged once can be stored no more"
        await leases_are_back(opened, arena)

    @pytest.mark.parametrize("edit", EDITS)
    async def test_a_persistent_tier_opens_over_damaged_content(
        self, tier: Tier, arena: Arena, allocate: Allocate, edit: str
    ) -> None:
        tier.bind(arena)
        async with tier:
            await put(tier, arena, [1, 2])
            if not (tier.capabilities.persistent and await self.damage(tier, key_of(1), EDITS[edit])):
                assert await holds(tier, 2, allocate)
                return
        again = self.reopen(tier)
        again.bind(arena)
        async with again:
            await _get_damaged(again, allocate)
            assert await holds(again, 2, allocate)
            await leases_are_back(again, arena)

    async def test_a_scrub_finds_what_is_damaged_and_leaves_the_rest(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, range(4))
        clean = await opened.scrub()
        assert not clean.corrupt, f"a scrub takes whole records for broken ones: {clean.corrupt}"
        assert clean.chunks in {0, 4}
        if await self.damage(opened, key_of(1), EDITS["payload flipped"]):
            report = await opened.scrub()
            assert sum(report.corrupt.values()) == bool(clean.chunks)
            if clean.chunks:
                assert await opened.get(key_of(1), allocate) is None
        assert all([await holds(opened, number, allocate) for number in (0, 2, 3)])
        await leases_are_back(opened, arena)

    async def test_another_chunks_record_is_not_taken_for_the_one_asked_for(
        self, opened: Tier, arena: Arena, allocate: Allocate
    ) -> None:
        await put(opened, arena, [1, 2])
        with record(arena, 2) as other:
            swapped = await self.damage(opened, key_of(1), lambda _: bytes(other.view))
        if swapped:
            await _get_damaged(opened, allocate)
        assert await holds(opened, 2, allocate)
        await leases_are_back(opened, arena)


async def _get_damaged(tier: Tier, allocate: Allocate) -> None:
    """Get chunk 1, alone and in a batch, and assert that each record that passes verification is right."""
    results = await tier.get_many([key_of(1), key_of(2)], allocate)
    assert len(results) == 2
    try:
        results.append(await tier.get(key_of(1), allocate))
    except TierError as error:
        results.append(error)
    for number, result in zip((1, 2, 1), results, strict=True):
        if result is None or isinstance(result, TierError):
            continue
        with result:
            if is_proven(result, number):
                check_record(result, number)


def _flipped(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 0x10
    return bytes(changed)
