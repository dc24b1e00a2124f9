"""The breaker around a tier: which errors count as failures, which calls are refused, and its state in metrics."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    TierClosedError,
    TierError,
    TierFullError,
    TierPartUnavailableError,
    TierSuspendedError,
    TierUnavailableError,
)
from lmcache_async.testing.records import allocator
from lmcache_async.tiers.middleware.base import Call, Verb
from lmcache_async.tiers.middleware.breaker import BreakerConfig, BreakerLayer, CircuitState
from lmcache_async.tiers.middleware.deadline import DeadlineConfig, DeadlineLayer
from lmcache_async.tiers.middleware.limit import LimitConfig, LimitLayer
from tests.tiers.layered import (
    HANG,
    LayeredTier,
    ToldTier,
    chunk,
    chunks,
    content,
    context,
    fill,
    in_virtual_time,
    key,
    release,
    taken,
)

KEYS = [key(number) for number in range(4)]
OPEN, CLOSED, HALF_OPEN = CircuitState.OPEN, CircuitState.CLOSED, CircuitState.HALF_OPEN


def away():
    return TierUnavailableError("away")


def broken_by(inner, *, timeout_s=30.0, tier="t", **options) -> LayeredTier:
    options = {"min_calls": 2, "window_calls": 4, "pause_s": 5, "slow_s": 4, "probes": 1} | options
    layer = BreakerLayer(BreakerConfig(**options), context(timeout_s=timeout_s, tier=tier))
    return LayeredTier(inner, layer, timeout_s=timeout_s)


def states(tier: LayeredTier):
    statistics = tier.layer_statistics()
    return statistics.lookup.state, statistics.read.state, statistics.write.state


async def fail_reads(tier, inner, count=2, error=None):
    for _ in range(count):
        inner.told.append(error or away())
        with pytest.raises((TierError, BudgetExceededError)):
            await tier.get(KEYS[0], None)


@in_virtual_time
async def test_after_failures_calls_fail_at_once_and_after_the_pause_it_closes_again(arena, caplog):
    caplog.set_level("INFO")
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    await fail_reads(tier, inner)
    asked = len(inner.calls)

    with pytest.raises(
        TierSuspendedError, match=r"tier 't': its breaker is open for reads; the next probe is in 5.0 s"
    ):
        await tier.get(KEYS[0], allocator(arena))
    assert len(inner.calls) == asked
    await asyncio.sleep(5)
    assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)
    assert states(tier) == (CLOSED, CLOSED, CLOSED)
    assert tier.layer_statistics().read.refused == 1
    assert [record.message for record in caplog.records if "tier 't'" in record.message] == [
        "tier 't': its reads fail or are slow; they are misses or drops until it recovers",
        "tier 't': its reads work again",
    ]


@in_virtual_time
async def test_while_reads_fail_nothing_is_looked_up_but_writes_go_on(arena):
    inner = ToldTier()
    tier = broken_by(inner)
    await fail_reads(tier, inner)

    assert states(tier) == (CLOSED, OPEN, CLOSED)
    for lookup in (tier.contains(KEYS[0]), tier.contains_many(KEYS), tier.count_prefix(KEYS)):
        with pytest.raises(TierSuspendedError):
            await lookup
    with chunk(arena, 1) as buffer:
        await tier.put(key(1), buffer)
    assert inner.records == {key(1): content(1)}


@in_virtual_time
async def test_while_writes_fail_reads_go_on(arena):
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    items = chunks(arena, 2)
    for _ in range(2):
        inner.told.append(away())
        assert [type(error) for error in await tier.put_many(items)] == [TierUnavailableError] * 2

    assert [type(error) for error in await tier.put_many(items)] == [TierSuspendedError] * 2
    with pytest.raises(TierSuspendedError):
        await tier.remove(KEYS[0])
    release(items)
    assert states(tier) == (CLOSED, CLOSED, OPEN)
    assert await tier.contains(KEYS[0])
    assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)


@in_virtual_time
async def test_probes_are_few_and_lookups_pass_only_while_one_could_read(arena):
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    await fail_reads(tier, inner)
    await asyncio.sleep(5)
    assert await tier.contains(KEYS[0])  # only a hit counts as a probe
    inner.told.append(1)
    probe = asyncio.ensure_future(tier.get(KEYS[0], allocator(arena)))
    await asyncio.sleep(0)

    with pytest.raises(TierSuspendedError, match="its breaker is open for reads; its probes are running"):
        await tier.get(KEYS[1], allocator(arena))
    with pytest.raises(TierSuspendedError):
        await tier.contains(KEYS[1])
    assert states(tier) == (CLOSED, HALF_OPEN, CLOSED)
    assert taken(await probe) == content(0)
    assert await tier.contains(KEYS[1])


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (away(), True),
        (TierError("odd"), True),
        (ValueError("a bug of the tier's"), True),
        (TierFullError("full"), False),
        (ChunkCorruptError("bad", cause="magic"), False),
        (TierClosedError("closed"), False),
        (TierSuspendedError("another breaker's"), False),
        (TierPartUnavailableError("one node of three"), False),
        (BudgetExceededError("our own memory"), False),
    ],
    ids=lambda value: type(value).__name__,
)
@in_virtual_time
async def test_errors_that_count_as_failures(error, counts):
    inner = ToldTier()
    tier = broken_by(inner)
    await fail_reads(tier, inner, count=2, error=error)

    assert states(tier)[1] is (OPEN if counts else CLOSED)


@in_virtual_time
async def test_misses_are_answers(arena):
    tier = broken_by(ToldTier())
    for _ in range(10):
        assert await tier.get(KEYS[0], allocator(arena)) is None
        assert not await tier.contains(KEYS[0])
        assert await tier.get_many(KEYS, allocator(arena)) == [None] * 4
        assert not await tier.remove(KEYS[0])

    assert states(tier) == (CLOSED, CLOSED, CLOSED)
    assert tier.layer_statistics().read.failures == 0


@pytest.mark.parametrize(("failed", "opens"), [(1, False), (2, True), (4, True)])
@in_virtual_time
async def test_a_batch_is_one_call_that_fails_with_its_share_of_failed_chunks(arena, failed, opens):
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    for _ in range(2):
        for one in KEYS[:failed]:
            inner.told_of[one].append(away())
        results = await tier.get_many(KEYS, allocator(arena))
        assert [isinstance(taken(result), bytes) for result in results] == [False] * failed + [True] * (
            4 - failed
        )

    assert states(tier)[1] is (OPEN if opens else CLOSED)
    assert tier.layer_statistics().read.calls == (0 if opens else 2)


@in_virtual_time
async def test_chunks_that_found_no_memory_of_ours_are_no_failures(arena):
    class NoMemory(ToldTier):
        async def get_many(self, keys, allocate):
            error = TierUnavailableError("no memory to read into")
            error.__cause__ = BudgetExceededError("none")
            return [error] * len(keys)

    tier = broken_by(NoMemory())
    for _ in range(4):
        await tier.get_many(KEYS, allocator(arena))

    assert states(tier)[1] is CLOSED


@in_virtual_time
async def test_slow_reads_are_failures_though_they_give_what_they_found(arena):
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    for seconds in (3.9, 3.9, 4.0, 4.0):
        inner.told.append(seconds)
        assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)

    assert states(tier)[1] is OPEN


@in_virtual_time
async def test_slow_writes_are_none_unless_that_is_asked_for(arena):
    for options, state in (({}, CLOSED), ({"slow_write_s": 4}, OPEN)):
        inner = ToldTier()
        tier = broken_by(inner, **options)
        with chunk(arena, 1) as buffer:
            for _ in range(2):
                inner.told.append(20)
                await tier.put(key(1), buffer)
        assert states(tier)[2] is state


@in_virtual_time
async def test_a_call_cancelled_early_does_not_count_and_one_cancelled_late_is_a_failure():
    for seconds, state in ((3.9, CLOSED), (4.0, OPEN)):
        inner = ToldTier()
        tier = broken_by(inner)
        for _ in range(2):
            inner.told.append(HANG)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await tier.get(KEYS[0], None)
        assert states(tier)[1] is state
        assert tier.layer_statistics().read.calls == 0


@in_virtual_time
async def test_a_write_that_misses_the_tiers_deadline_has_failed():
    inner = ToldTier()
    tier = broken_by(inner, timeout_s=10)
    for _ in range(2):
        inner.told.append(HANG)
        with pytest.raises(TierUnavailableError, match="did not answer in 10"):
            await tier.remove(KEYS[0])

    assert states(tier)[2] is OPEN


@in_virtual_time
async def test_calls_that_cannot_be_cancelled_open_it_too():
    may_end = asyncio.Event()

    class Stuck(ToldTier):
        async def get_many(self, keys, allocate):
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            return [None] * len(keys)

    inner = Stuck()
    tier = broken_by(inner)
    tasks = [asyncio.ensure_future(tier.get(KEYS[0], None)) for _ in range(2)]
    await asyncio.sleep(4)
    assert not any(task.done() for task in tasks)

    with pytest.raises(TierSuspendedError):
        await tier.contains(KEYS[0])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert states(tier)[1] is OPEN
    assert tier.late_calls == 2
    may_end.set()
    assert await tier.drain(timeout_s=1)


@in_virtual_time
async def test_lookups_in_our_own_memory_hide_no_failures_and_are_no_probes(arena):
    inner = fill(ToldTier(far=False), 4)
    tier = broken_by(inner)
    for _ in range(2):
        assert await tier.contains_many(KEYS) == [True] * 4
        await fail_reads(tier, inner, count=1)
    assert states(tier)[1] is OPEN
    await asyncio.sleep(5)

    for _ in range(5):
        assert await tier.contains_many(KEYS) == [True] * 4
    assert states(tier)[1] is OPEN  # no read has probed the tier yet
    assert tier.layer_statistics().lookup.calls == 0
    assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)
    assert states(tier)[1] is CLOSED


@in_virtual_time
async def test_clear_and_keys_are_never_refused(arena):
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    await fail_reads(tier, inner)

    assert len([one async for one in tier.keys()]) == 4  # noqa: SIM118 - no dict
    assert await tier.clear() == 4


async def test_statistics_can_be_read_from_outside_of_the_loop():
    tier = broken_by(ToldTier())
    await tier.contains(KEYS[0])

    statistics = await asyncio.to_thread(tier.layer_statistics)

    assert statistics.lookup.calls == 1


@in_virtual_time
async def test_a_call_that_a_deadline_outside_ends_a_little_early_is_a_failure():
    layer = BreakerLayer(BreakerConfig(min_calls=1, window_calls=1), context(timeout_s=3))

    async def hangs(call):
        await asyncio.get_running_loop().create_future()

    call = Call(Verb.REMOVE, (KEYS[0],), deadline=asyncio.get_running_loop().time() + 3)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3 - 0.0005):  # uvloop's timers have a resolution of 1 ms
            await layer.around(call, hangs)
    assert layer.statistics().write.state is OPEN


@pytest.mark.parametrize("outside", [False, True])
@in_virtual_time
async def test_a_call_that_had_little_time_left_after_a_wait_for_room_is_no_failure(arena, outside):
    inner = fill(ToldTier(), 4)
    inner.told.extend([25, 10])
    breaker = BreakerLayer(BreakerConfig(min_calls=1, window_calls=1, slow_s=30), context())
    layers = [LimitLayer(LimitConfig(max_calls=1), context()), breaker]
    if outside:
        layers.insert(0, DeadlineLayer(DeadlineConfig(), context()))
    tier = LayeredTier(inner, *layers)

    first, second = await asyncio.gather(
        *(tier.get(KEYS[number], allocator(arena)) for number in range(2)), return_exceptions=True
    )
    assert taken(first) == content(0)
    assert isinstance(second, TierUnavailableError)
    assert breaker.statistics().read.state is CLOSED
