"""Injected faults: each kind, drawn from a seed, without leaks."""

from __future__ import annotations

import asyncio
import random

import pytest

from lmcache_async.errors import TierUnavailableError
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import allocator
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.middleware.faults import FaultsConfig, FaultsLayer
from tests.tiers.layered import (
    LayeredTier,
    ScriptedTier,
    call,
    chunk,
    content,
    context,
    fill,
    in_virtual_time,
    key,
    now,
    taken,
)

COUNT = 12
KEYS = [key(number) for number in range(COUNT)]


def faulty(inner=None, **options) -> LayeredTier:
    return LayeredTier(inner or DictTier(), FaultsLayer(FaultsConfig(**options), context()))


def filled(count=COUNT) -> DictTier:
    return fill(DictTier(), count)


async def put_all(tier, arena, count=COUNT):
    buffers = [chunk(arena, number) for number in range(count)]
    try:
        return await tier.put_many([(key(number), buffer) for number, buffer in enumerate(buffers)])
    finally:
        for buffer in buffers:
            buffer.release()


async def get_all(tier, arena):
    """Result of each get: the bytes, the type of an error, or None."""
    results = await tier.get_many(KEYS, allocator(arena))
    return [type(result) if isinstance(result, Exception) else taken(result) for result in results]


async def test_errors_affect_single_chunks_of_a_batch(arena):
    tier = faulty(filled(), seed=5, error=0.4)

    got = await get_all(tier, arena)

    failed = [number for number, result in enumerate(got) if result is TierUnavailableError]
    assert 0 < len(failed) < COUNT
    assert all(got[number] == content(number) for number in range(COUNT) if number not in failed)
    assert tier.layer_statistics().counts == {"get.error": len(failed)}


@pytest.mark.parametrize(
    "verb", ["contains", "contains_many", "count_prefix", "get", "put", "remove", "reject"]
)
async def test_every_verb_fails_when_a_fault_is_drawn(arena, verb):
    with pytest.raises(TierUnavailableError, match=r"tier 't': injected failure of \w+"):
        await call(faulty(error=1), verb, arena)


async def test_options_of_one_verb_override_those_of_all_verbs(arena):
    tier = faulty(filled(), error=1, get={"error": 0})

    assert taken(await tier.get(key(1), allocator(arena))) == content(1)
    with pytest.raises(TierUnavailableError):
        await tier.contains(key(1))


async def test_failed_puts_may_have_taken_effect(arena):
    inner = DictTier()
    tier = faulty(inner, seed=2, put={"error": 1})

    errors = await put_all(tier, arena)

    assert [type(error) for error in errors] == [TierUnavailableError] * COUNT
    assert 0 < len(inner.records) < COUNT
    assert all(inner.records[key(n)] == content(n) for n in range(COUNT) if key(n) in inner.records)


async def test_a_dropped_put_reports_success(arena):
    inner = DictTier()
    tier = faulty(inner, seed=2, drop=0.5)

    assert await put_all(tier, arena) == [None] * COUNT
    assert 0 < len(inner.records) < COUNT
    assert tier.layer_statistics().counts == {"put.drop": COUNT - len(inner.records)}


async def test_a_damaged_record_is_flipped_or_truncated_and_the_tiers_own_is_right(arena):
    inner = filled()

    for number, got in enumerate(await get_all(faulty(inner, corrupt=1, damages=["flip"]), arena)):
        right = content(number)
        assert len(got) == len(right)
        assert sum(a != b for a, b in zip(got, right, strict=True)) == 1
    for number, got in enumerate(await get_all(faulty(inner, corrupt=1, damages=["truncate"]), arena)):
        assert content(number).startswith(got)
        assert len(got) < len(content(number))
    assert inner.records == {key(number): content(number) for number in range(COUNT)}


async def test_the_damage_other_returns_a_record_that_was_put(arena):
    tier = faulty(corrupt=1, damages=["other"], seed=3)
    await put_all(tier, arena)

    got = await get_all(tier, arena)

    others = [number for number, result in enumerate(got) if result != content(number)]
    assert len(others) > COUNT // 2
    assert set(got) <= {content(number) for number in range(COUNT)}
    assert taken(await tier.get(key(0), allocator(arena))) in {content(number) for number in range(COUNT)}


async def test_a_slab_that_others_read_is_not_written_to(arena):
    class Sharing(DictTier):
        def __init__(self, kept):
            super().__init__()
            self.kept = kept

        @property
        def capabilities(self):
            return Capabilities(own_memory=True)

        async def get(self, key, allocate):
            return self.kept.retain()

    with chunk(arena, 1) as kept:
        tier = faulty(Sharing(kept), corrupt=1, damages=["flip"])
        got = taken(await tier.get(key(1), allocator(arena)))

        assert content(1).startswith(got)
        assert len(got) < len(content(1))
        assert bytes(kept.view) == content(1)


async def test_contains_returns_the_opposite_for_stored_and_missing_chunks():
    tier = faulty(filled(2), lie=1)

    assert await tier.contains(key(5))
    assert not await tier.contains(key(1))
    assert await tier.contains_many([key(0), key(5)]) == [False, True]
    far = faulty(fill(ScriptedTier(), 2), lie=1)
    assert {await far.count_prefix(KEYS) for _ in range(40)} > {0, COUNT}


@in_virtual_time
async def test_a_delay_is_in_loop_time_and_applies_to_the_whole_call():
    tier = faulty(filled(), delay=1, delay_s=5)
    start = now()

    assert await tier.contains_many(KEYS) == [True] * COUNT
    assert now() - start == pytest.approx(5)
    assert tier.layer_statistics().counts == {"contains.delay": 1}


@pytest.mark.parametrize("verb", ["contains", "get", "put_many", "remove"])
async def test_a_hanging_call_ends_when_it_is_cancelled(arena, verb):
    task = asyncio.ensure_future(call(faulty(hang=1), verb, arena))
    await turns(20)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_seed_has_the_same_faults_again_and_another_seed_has_others(arena):
    async def story(seed):
        tier = faulty(filled(), seed=seed, error=0.3, corrupt=0.3, drop=0.3, lie=0.3)
        stored = [type(error) for error in await put_all(tier, arena)]
        there = await tier.contains_many(KEYS)
        return stored, there, await get_all(tier, arena), tier.layer_statistics()

    assert await story(1) == await story(1)
    assert await story(1) != await story(2)


async def test_the_random_source_can_be_given(arena):
    options = FaultsConfig(error=0.5)
    tiers = [LayeredTier(filled(), FaultsLayer(options, context(), rng=random.Random(9))) for _ in range(2)]

    assert await get_all(tiers[0], arena) == await get_all(tiers[1], arena)


async def test_a_warning_before_the_tier_opens_names_the_layer_and_its_options(arena, caplog):
    faulty(seed=4, error=0.1).bind(arena)

    [warning] = caplog.records
    assert warning.levelname == "WARNING"
    assert "tier 't': the layer 'l' injects faults ({'seed': 4, 'error': 0.1})" in warning.message
