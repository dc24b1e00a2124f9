"""Deadlines by kind of call, and calls abandoned at them."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_async.errors import TierUnavailableError
from lmcache_async.testing.records import allocator
from lmcache_async.tiers.middleware.deadline import DeadlineConfig, DeadlineLayer
from lmcache_async.tiers.middleware.retry import RetryConfig, RetryLayer
from tests.tiers.layered import (
    HANG,
    Highest,
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

BOUNDS = {"lookup_s": 1.0, "read_s": 2.0, "write_s": 3.0}


def bounded(inner, *, close_timeout_s=None, **options) -> LayeredTier:
    layer = DeadlineLayer(DeadlineConfig(**options), context())
    return LayeredTier(inner, layer, close_timeout_s=close_timeout_s)


class StubbornTier(ScriptedTier):
    """A tier whose cancelled get still returns later, like one in a thread."""

    def __init__(self):
        super().__init__()
        self.may_end = asyncio.Event()

    async def get_many(self, keys, allocate):
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                continue
        return await super().get_many(keys, allocate)


@pytest.mark.parametrize(
    ("verb", "after"),
    [
        *[("contains_many", 1), ("count_prefix", 1), ("get_many", 2)],
        *[("put_many", 3), ("remove", 3), ("reject", 3), ("clear", 3)],
    ],
)
@in_virtual_time
async def test_each_kind_of_call_has_its_deadline(arena, verb, after):
    inner = fill(ScriptedTier(), 2)
    inner.script.append(HANG)
    tier = bounded(inner, **BOUNDS)
    start = now()
    with pytest.raises(TierUnavailableError, match=rf"tier 't': {verb} did not answer in {after}.0 s"):
        await call(tier, "put" if verb == "put_many" else verb, arena)
    assert now() - start == pytest.approx(after)
    assert await tier.drain(timeout_s=1)


@in_virtual_time
async def test_a_kind_without_a_limit_has_the_tiers_timeout(arena):
    inner = fill(ScriptedTier(), 2)
    inner.script.extend([29, HANG])
    tier = bounded(inner)
    start = now()

    assert taken(await tier.get(key(1), allocator(arena))) == content(1)
    with pytest.raises(TierUnavailableError, match=r"get_many did not answer in 30.0 s"):
        await tier.get_many([key(1)], allocator(arena))
    assert now() - start == pytest.approx(59)


@in_virtual_time
async def test_a_call_after_the_deadline_of_its_request_is_not_made():
    inner = fill(ScriptedTier(), 1)
    tier = bounded(inner)
    with pytest.raises(TierUnavailableError, match=r"'t': count_prefix was not called: no time was left"):
        await tier.handle.lookup([key(0)], deadline=now() - 1)

    assert not inner.calls


@in_virtual_time
async def test_retries_inside_end_in_time_so_that_what_was_read_is_returned(arena):
    inner = fill(ScriptedTier(), 2)
    inner.chunk_errors[key(1)].append(TierUnavailableError("away"))
    inner.script.extend([1, HANG])
    retry = RetryLayer(RetryConfig(base_s=1.5, max_s=1.5), context(), rng=Highest())
    tier = LayeredTier(inner, DeadlineLayer(DeadlineConfig(**BOUNDS), context()), retry)

    first, second = await tier.get_many([key(0), key(1)], allocator(arena))
    assert taken(first) == content(0)
    assert isinstance(second, TierUnavailableError)


@in_virtual_time
async def test_lookups_in_a_local_index_are_not_bounded():
    inner = fill(ScriptedTier(far=False), 1)
    inner.script.append(20)

    assert await bounded(inner, **BOUNDS).contains(key(0))


@in_virtual_time
async def test_a_late_call_counts_until_it_has_ended_and_its_buffer_comes_back(arena):
    inner = fill(StubbornTier(), 1)
    tier = bounded(inner, **BOUNDS)
    with pytest.raises(TierUnavailableError):
        await tier.get(key(0), allocator(arena))

    assert tier.late_calls == 1
    assert not await tier.drain(timeout_s=5)
    inner.may_end.set()
    assert await tier.drain(timeout_s=5)
    assert tier.late_calls == 0


@in_virtual_time
async def test_closing_waits_for_late_calls_once_and_within_its_time(arena):
    inner = fill(StubbornTier(), 1)
    tier = bounded(inner, close_timeout_s=4, **BOUNDS)
    async with tier:
        with pytest.raises(TierUnavailableError):
            await tier.get(key(0), allocator(arena))
        start = now()
    assert now() - start == pytest.approx(4)
    inner.may_end.set()
    assert await tier.drain(timeout_s=1)


@in_virtual_time
async def test_a_late_put_keeps_its_bytes_until_it_has_ended(arena):
    seen = []

    class Late(ScriptedTier):
        async def put_many(self, items):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
            seen.extend(bytes(buffer.view) for _, buffer in items)

    tier = bounded(Late(), **BOUNDS)
    buffer = chunk(arena, 7)
    with pytest.raises(TierUnavailableError):
        await tier.put(key(7), buffer)
    buffer.release()

    assert await tier.drain(timeout_s=10)
    assert seen == [content(7)]
