"""Retries: of retryable errors, of failed chunks only, with jitter, within the deadline."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    TierError,
    TierFullError,
    TierSuspendedError,
    TierUnavailableError,
)
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.records import allocator, small_arena
from lmcache_async.tiers.middleware.retry import RetryConfig, RetryLayer, RetryStatistics
from lmcache_async.tiers.results import memory_was_short
from tests.tiers.layered import (
    HANG,
    Highest,
    LayeredTier,
    ScriptedTier,
    VirtualLoop,
    call,
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

KEYS = [key(number) for number in range(4)]


def away():
    return TierUnavailableError("away")


def retrying(inner, *, timeout_s=30.0, rng=None, **options) -> LayeredTier:
    layer = RetryLayer(RetryConfig(**options), context(timeout_s=timeout_s), rng=rng or Highest())
    return LayeredTier(inner, layer, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("failures", "options", "seconds"),
    [
        (2, {"attempts": 3, "base_s": 0.5, "max_s": 10}, 0.5 + 1.0),
        (9, {"attempts": 10, "base_s": 1, "max_s": 2, "timeout_s": 100}, 1 + 8 * 2),
    ],
    ids=["growing", "up to max_s"],
)
@in_virtual_time
async def test_a_call_succeeds_after_pauses_that_grow_up_to_their_bound(failures, options, seconds):
    inner = fill(ScriptedTier(), 1)
    inner.script.extend(away() for _ in range(failures))
    tier = retrying(inner, **options)
    start = now()

    assert await tier.contains(KEYS[0])
    assert now() - start == pytest.approx(seconds)
    assert tier.layer_statistics() == RetryStatistics(retries=failures, recovered=1, exhausted=0)


@in_virtual_time
async def test_when_no_attempt_is_left_the_last_error_is_raised():
    inner = ScriptedTier()
    inner.script.extend([away(), away(), TierUnavailableError("the third")])
    tier = retrying(inner, attempts=3)

    with pytest.raises(TierUnavailableError, match="the third"):
        await tier.contains(KEYS[0])
    assert len(inner.calls) == 3
    assert tier.layer_statistics() == RetryStatistics(retries=2, recovered=0, exhausted=1)


@pytest.mark.parametrize(
    "error",
    [
        TierError("no"),
        TierFullError("full"),
        ChunkCorruptError("bad", cause="magic"),
        TierSuspendedError("open"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_permanent_errors_are_not_retried(error):
    inner = ScriptedTier()
    inner.script.append(error)

    with pytest.raises(type(error) if isinstance(error, TierError) else TierError):
        await retrying(inner).contains(KEYS[0])
    assert len(inner.calls) == 1


@in_virtual_time
async def test_chunks_without_arena_memory_are_not_retried(arena):
    """Retries would wait for memory while holding the memory of the others."""
    error = TierUnavailableError("no memory to read into")
    error.__cause__ = BudgetExceededError("none")
    inner = fill(ScriptedTier(), 4)
    inner.chunk_errors[KEYS[1]].append(error)
    inner.script.extend([None, error])
    tier = retrying(inner)

    results = await tier.get_many(KEYS[:3], allocator(arena))

    assert [taken(result) for result in results] == [content(0), error, content(2)]
    with pytest.raises(TierUnavailableError):
        await tier.get(KEYS[1], allocator(arena))
    assert len(inner.calls) == 2


@in_virtual_time
async def test_chunks_that_were_read_stay_usable_if_a_later_attempt_has_no_memory(arena):
    inner = fill(ScriptedTier(), 4)
    inner.chunk_errors[KEYS[1]].append(away())
    inner.script.extend([None, BudgetExceededError("none")])
    tier = retrying(inner)

    results = await tier.get_many(KEYS[:3], allocator(arena))

    assert [taken(results[0]), taken(results[2])] == [content(0), content(2)]
    assert isinstance(results[1], TierError)
    assert memory_was_short(results[1])


@pytest.mark.parametrize("verb", ["contains_many", "count_prefix", "get", "put", "remove", "reject"])
async def test_every_verb_is_tried_again(arena, verb):
    inner = fill(ScriptedTier(), 4)
    inner.script.append(away())
    result = await call(retrying(inner, base_s=1e-6), verb, arena)

    right = {"contains_many": [True] * 4, "count_prefix": 4, "get": content(1), "put": None}
    assert result == right.get(verb, True)
    assert len(inner.calls) == 2


@in_virtual_time
async def test_only_the_failed_puts_of_a_batch_are_repeated(arena):
    inner = ScriptedTier()
    inner.chunk_errors[KEYS[0]].append(away())
    inner.chunk_errors[KEYS[1]].append(TierError("for good"))
    inner.chunk_errors[KEYS[3]].extend(away() for _ in range(3))
    tier = retrying(inner)
    items = chunks(arena, 4)

    results = await tier.put_many(items)
    release(items)

    assert [type(result) for result in results] == [type(None), TierError, type(None), TierUnavailableError]
    assert [keys for _, keys in inner.calls] == [KEYS, [KEYS[0], KEYS[3]], [KEYS[3]]]
    assert inner.records == {key(number): content(number) for number in (0, 2)}
    assert tier.layer_statistics() == RetryStatistics(retries=2, recovered=1, exhausted=1)


@in_virtual_time
async def test_a_batch_that_keeps_failing_ends_with_the_chunks_it_has(arena):
    inner = fill(ScriptedTier(), 4)
    inner.chunk_errors[KEYS[2]].append(away())
    inner.script.extend([None, away(), TierError("now for good")])

    tier = retrying(inner)

    results = await tier.get_many(KEYS, allocator(arena))

    assert [taken(result) for result in results[:2]] == [content(0), content(1)]
    assert str(results[2]) == "now for good"
    assert taken(results[3]) == content(3)
    assert tier.layer_statistics() == RetryStatistics(retries=2, recovered=0, exhausted=0)


@in_virtual_time
async def test_a_call_whose_failure_opens_the_breaker_ends_with_that_failure(arena):
    inner = fill(ScriptedTier(), 4)
    tier = retrying(inner)
    inner.script.extend([away(), TierSuspendedError("open")])
    with pytest.raises(TierUnavailableError, match="away"):
        await tier.contains(KEYS[0])
    inner.script.extend([away(), TierSuspendedError("open")])
    assert [str(result) for result in await tier.get_many(KEYS[:2], allocator(arena))] == ["away"] * 2
    inner.chunk_errors[KEYS[1]].append(away())
    inner.script.extend([None, TierSuspendedError("open")])

    first, second = await tier.get_many(KEYS[:2], allocator(arena))

    assert taken(first) == content(0)
    assert str(second) == "away"


@in_virtual_time
async def test_a_batch_that_cannot_be_retried_raises_as_it_would_without():
    inner = ScriptedTier()
    inner.script.append(TierError("for good"))

    with pytest.raises(TierError, match="for good"):
        await retrying(inner).get_many([], None)


@in_virtual_time
async def test_no_pause_is_begun_that_would_end_after_the_deadline():
    inner = ScriptedTier()
    inner.script.extend(away() for _ in range(100))
    tier = retrying(inner, attempts=100, base_s=1, max_s=1, timeout_s=3.5)
    start = now()

    with pytest.raises(TierUnavailableError):
        await tier.contains(KEYS[0])
    assert now() - start == pytest.approx(3.0)
    assert len(inner.calls) == 4


@pytest.mark.parametrize(("again", "attempts"), [([], 1), ([HANG], 2)], ids=["in a pause", "in a retry"])
@in_virtual_time
async def test_a_call_cancelled_after_its_first_attempt_ends_at_once_and_leaves_no_lease(
    arena, again, attempts
):
    inner = fill(ScriptedTier(), 4)
    inner.chunk_errors[KEYS[2]].append(away())
    inner.script.extend([None, *again])
    tier = retrying(inner, base_s=0.5 if again else 5, max_s=5)
    task = asyncio.ensure_future(tier.get_many(KEYS, allocator(arena)))
    start = now()
    await asyncio.sleep(1)
    assert len(inner.calls) == attempts
    assert arena.statistics().leased_slabs == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert now() - start == pytest.approx(1)
    assert len(inner.calls) == attempts
    assert arena.statistics().leased_slabs == 0


def test_jitter_is_full_and_repeats_with_its_seed():
    async def ends(seed):
        """Times at which the calls of a hundred clients succeed."""
        inner = fill(ScriptedTier(), 1)
        inner.script.extend(away() for _ in range(100))
        layer = LayeredTier(inner, RetryLayer(RetryConfig(base_s=1, max_s=1, seed=seed), context()))
        start = now()
        times = []

        async def client():
            await layer.contains(KEYS[0])
            times.append(now() - start)

        await asyncio.gather(*(client() for _ in range(100)))
        return times

    def run(seed):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(ends(seed))

    times = run(1)
    assert times == run(1)
    assert times != run(2)
    assert times != run(None)
    assert min(times) < 0.1
    assert max(times) > 0.9
    assert len(set(times)) == 100


@given(
    faults=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    attempts=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_a_batch_has_the_results_of_single_calls(faults, attempts, seed):
    """Chunk n fails `faults[n]` times; it succeeds if there are enough attempts."""

    async def main():
        arena = small_arena(8)
        inner = fill(ScriptedTier(), 6)
        for number, count in enumerate(faults):
            inner.chunk_errors[key(number)].extend(away() for _ in range(count))
        tier = LayeredTier(inner, RetryLayer(RetryConfig(attempts=attempts, seed=seed), context()))
        results = await tier.get_many([key(number) for number in range(6)], allocator(arena))

        for number, (count, result) in enumerate(zip(faults, results, strict=True)):
            if count < attempts:
                assert taken(result) == content(number)
            else:
                assert isinstance(result, TierUnavailableError)
            asked = sum(key(number) in keys for _, keys in inner.calls)
            assert asked == min(count + 1, attempts)
        assert not any(isinstance(result, Buffer) and not result.released for result in results)
        assert arena.statistics().leased_slabs == 0
        arena.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
