"""Limits: FIFO order, in calls and in bytes, also shared by several tiers."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import BudgetExceededError, ConfigError, TierError, TierUnavailableError
from lmcache_async.testing.records import SLAB_BYTES, allocator
from lmcache_async.tiers.middleware.limit import LimitConfig, LimitLayer, split
from lmcache_async.tiers.results import memory_was_short
from tests.tiers.layered import (
    HANG,
    LayeredTier,
    ScriptedTier,
    chunks,
    content,
    context,
    fill,
    in_virtual_time,
    key,
    now,
    release,
    taken,
)

KEYS = [key(number) for number in range(6)]


def limited(inner, *, where=None, arena=None, **options) -> LayeredTier:
    where = where or context()
    layer = LayeredTier(inner, LimitLayer(LimitConfig(**options), where), timeout_s=where.timeout_s)
    if arena is not None:
        layer.bind(arena)
    return layer


def idle(layer: LayeredTier) -> bool:
    statistics = layer.layer_statistics()
    return all(
        part is None or (part.used_bytes, part.waiting) == (0, 0)
        for part in (statistics.calls, statistics.bytes)
    )


@in_virtual_time
async def test_no_more_calls_than_allowed_are_under_way_and_they_start_in_order():
    inner = ScriptedTier()
    inner.script.extend([1.0] * 6)
    tier = limited(inner, max_calls=2)
    start = now()

    await asyncio.gather(*(tier.contains(one) for one in KEYS))

    assert inner.peak == 2
    assert now() - start == pytest.approx(3)
    assert inner.calls == [("contains_many", [one]) for one in KEYS]
    assert idle(tier)


@in_virtual_time
async def test_puts_wait_for_bytes(arena):
    inner = ScriptedTier()
    inner.script.extend([1.0] * 5)
    tier = limited(inner, max_bytes=2500)  # of chunks of 1000 bytes
    items = chunks(arena, 5)

    await asyncio.gather(*(tier.put(*item) for item in items))
    release(items)

    assert inner.peak == 2
    assert idle(tier)


@in_virtual_time
async def test_gets_count_with_the_largest_record_size(arena):
    inner = fill(ScriptedTier(), 6)
    inner.script.extend([1.0] * 6)
    tier = limited(inner, max_bytes=3 * SLAB_BYTES, arena=arena)

    results = await asyncio.gather(*(tier.get(one, allocator(arena)) for one in KEYS))

    assert [taken(result) for result in results] == [content(number) for number in range(6)]
    assert inner.peak == 3
    assert idle(tier)


@in_virtual_time
async def test_a_batch_larger_than_the_limit_is_split_into_parts_as_large_as_fit(arena):
    inner = ScriptedTier()
    tier = limited(inner, max_bytes=2 * SLAB_BYTES, arena=arena)
    items = chunks(arena, 6)

    assert await tier.put_many(items) == [None] * 6
    release(items)
    results = await tier.get_many([*KEYS[:5], key(99)], allocator(arena))

    assert [taken(result) for result in results] == [*(content(number) for number in range(5)), None]
    puts, gets = inner.calls[:1], inner.calls[1:]
    assert puts == [("put_many", KEYS)]  # six chunks of 1000 bytes
    assert [len(keys) for _, keys in gets] == [2, 2, 2]
    assert idle(tier)


@in_virtual_time
async def test_a_chunk_larger_than_the_limit_is_a_part_of_its_own(arena):
    inner = ScriptedTier()
    inner.script.extend([1.0] * 3)
    tier = limited(inner, max_bytes=10)
    items = chunks(arena, 3)

    assert await tier.put_many(items) == [None] * 3
    await asyncio.gather(*(tier.put(*item) for item in items))
    release(items)

    assert inner.peak == 1
    assert [len(keys) for _, keys in inner.calls] == [1] * 6


@in_virtual_time
async def test_a_part_that_fails_leaves_the_others_as_they_are(arena):
    inner = fill(ScriptedTier(), 6)
    inner.script.extend([None, TierError("the second part"), None])
    tier = limited(inner, max_bytes=2 * SLAB_BYTES, arena=arena)

    results = await tier.get_many(KEYS, allocator(arena))

    assert [str(result) for result in results[2:4]] == ["the second part"] * 2
    assert [taken(result) for result in results[:2] + results[4:]] == [content(n) for n in (0, 1, 4, 5)]


@pytest.mark.parametrize("first", [True, False])
@in_virtual_time
async def test_parts_that_were_read_stay_usable_if_a_later_one_has_no_memory(arena, first):
    inner = fill(ScriptedTier(), 6)
    inner.script.extend([*([] if first else [None]), BudgetExceededError("none")])
    tier = limited(inner, max_bytes=2 * SLAB_BYTES, arena=arena)

    if first:
        with pytest.raises(BudgetExceededError):
            await tier.get_many(KEYS, allocator(arena))
    else:
        results = await tier.get_many(KEYS, allocator(arena))
        assert [taken(result) for result in results[:2]] == [content(0), content(1)]
        assert all(map(memory_was_short, results[2:]))
    assert len(inner.calls) == (1 if first else 2)
    assert idle(tier)


@in_virtual_time
async def test_a_batch_in_one_part_that_fails_raises():
    inner = ScriptedTier()
    inner.script.append(TierError("as a whole"))
    tier = limited(inner, max_calls=1)

    with pytest.raises(TierError, match="as a whole"):
        await tier.get_many(KEYS, None)
    assert idle(tier)


@in_virtual_time
async def test_a_waiter_without_room_in_time_fails_and_the_next_one_is_served():
    inner = fill(ScriptedTier(), 6)
    inner.script.append(3)
    shared = {}
    slow = limited(inner, max_calls=1, share="nic", where=context(shared=shared))
    tier = limited(inner, max_calls=1, share="nic", where=context(shared=shared, timeout_s=2))
    first = asyncio.ensure_future(slow.contains(key(0)))
    await asyncio.sleep(0)
    start = now()

    with pytest.raises(TierUnavailableError, match=r"tier 't': no room under max_calls of 1 within 2 s"):
        await tier.contains(key(1))
    assert now() - start == pytest.approx(2)
    last = asyncio.ensure_future(tier.contains(key(2)))
    await asyncio.sleep(0.5)
    assert not last.done()
    assert await first
    assert await last
    assert idle(tier)


@in_virtual_time
async def test_lookups_and_removals_do_not_wait_for_bytes(arena):
    inner = fill(ScriptedTier(), 3)
    inner.script.extend([5, 0, 0])
    tier = limited(inner, max_bytes=SLAB_BYTES, arena=arena)
    reading = [asyncio.ensure_future(tier.get(one, allocator(arena))) for one in KEYS[:2]]
    await asyncio.sleep(1)
    start = now()

    assert await tier.contains(key(2))
    assert await tier.remove(key(2))
    assert now() == start
    assert [taken(await each) for each in reading] == [content(0), content(1)]
    assert idle(tier)


@in_virtual_time
async def test_lookups_in_a_local_index_do_not_wait():
    inner = fill(ScriptedTier(far=False), 6)
    inner.script.append(HANG)
    tier = limited(inner, max_calls=1)
    hanging = asyncio.ensure_future(tier.remove(key(0)))
    await asyncio.sleep(0)

    assert await tier.contains_many(KEYS) == [True] * 6
    hanging.cancel()
    await asyncio.wait({hanging})
    assert idle(tier)


@in_virtual_time
async def test_tiers_with_the_same_share_have_one_limit_together():
    shared = {}
    inners = [ScriptedTier(), ScriptedTier(), ScriptedTier()]
    for inner in inners:
        inner.script.append(1.0)
    names = ["nic", "nic", "disk"]
    tiers = [
        limited(inner, max_calls=1, share=name, where=context(shared=shared, tier=f"t{number}"))
        for number, (inner, name) in enumerate(zip(inners, names, strict=True))
    ]
    start = now()
    ends = {}

    async def ask(number):
        await tiers[number].contains(key(0))
        ends[number] = now() - start

    await asyncio.gather(*(ask(number) for number in range(3)))

    assert ends == {0: pytest.approx(1), 1: pytest.approx(2), 2: pytest.approx(1)}
    assert tiers[0].layer_statistics() == tiers[1].layer_statistics()


def test_the_same_share_with_other_options_stops_the_start():
    shared = {}
    limited(ScriptedTier(), max_calls=1, share="nic", where=context(shared=shared, tier="a"))

    with pytest.raises(ConfigError) as caught:
        limited(ScriptedTier(), max_calls=2, share="nic", where=context(shared=shared, tier="b"))
    assert str(caught.value) == (
        "tiers[0] (b), layers[0] (l): share 'nic' has other options than in tiers[0] (a), layers[0] (l):"
        " set the same options in both, or use two names"
    )


@given(st.lists(st.integers(0, 9), max_size=20), st.none() | st.integers(1, 20))
def test_parts_cover_all_chunks_in_order_and_are_as_large_as_fit(sizes, max_bytes):
    parts = split(sizes, max_bytes)

    assert [position for start, stop in parts for position in range(start, stop)] == list(range(len(sizes)))
    for start, stop in parts:
        assert stop - start == 1 or max_bytes is None or sum(sizes[start:stop]) <= max_bytes
    for (start, _), (_, stop) in itertools.pairwise(parts):
        assert max_bytes is not None
        assert sum(sizes[start:stop]) > max_bytes
