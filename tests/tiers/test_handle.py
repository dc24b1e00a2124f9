"""The handle of a tier: deadlines, errors, abandoned calls, and third-party layers."""

import asyncio
import contextlib
import logging

import pytest

from lmcache_async.errors import BudgetExceededError, TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import wait_done
from lmcache_async.testing.fakes import DictTier, FaultyTier
from lmcache_async.testing.records import allocator, small_arena
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.layers.around import AroundLayer
from lmcache_async.tiers.middleware.base import Layer, LayerConfig
from lmcache_async.tiers.middleware.breaker import BreakerConfig, BreakerLayer
from lmcache_async.tiers.middleware.deadline import DeadlineConfig, DeadlineLayer
from lmcache_async.tiers.middleware.limit import LimitConfig, LimitLayer
from lmcache_async.tiers.middleware.metrics import MetricsLayer
from lmcache_async.tiers.middleware.retry import RetryConfig, RetryLayer
from lmcache_async.tiers.results import memory_was_short, release_results
from lmcache_async.types import ChunkKey
from tests.tiers.layered import LayeredTier, context, fill, in_virtual_time, key

KEY = ChunkKey(b"k" * 16)


def guard(inner, timeout_s=5.0):
    return LayeredTier(inner, timeout_s=timeout_s)


async def test_a_read_has_at_most_two_buffers_per_key_also_if_it_asks_for_many_at_once(arena):
    given = []

    class Greedy(DictTier):
        async def get(self, key, allocate):
            wanted = await asyncio.gather(*(allocate(10) for _ in range(9)), return_exceptions=True)
            given.extend(one for one in wanted if isinstance(one, Buffer))

    async def allocate(nbytes):
        await asyncio.sleep(0)
        return await arena.lease(nbytes, timeout_s=1)

    assert await guard(Greedy()).get(KEY, allocate) is None
    assert len(given) == 2


async def test_any_exception_of_a_tier_becomes_a_tier_error():
    inner = FaultyTier(DictTier())
    inner.faults.append(ValueError("odd"))
    tier = guard(inner)

    with pytest.raises(TierError, match="tier 't': contains_many raised ValueError: odd"):
        await tier.contains(KEY)
    assert await tier.contains(KEY) is False


class _Stuck(DictTier):
    """A tier that never opens, or never closes."""

    def __init__(self, *, opens):
        super().__init__()
        self.opens = opens

    async def __aenter__(self):
        if not self.opens:
            await asyncio.Event().wait()
        return self

    async def __aexit__(self, *_):
        await asyncio.Event().wait()


@in_virtual_time
async def test_a_tier_that_never_opens_is_an_error_at_the_deadline():
    logger = LimitedLogger(logging.getLogger("test"))
    tier = TierHandle(_Stuck(opens=False), name="t", timeout_s=5, open_timeout_s=3, logger=logger)
    with pytest.raises(TierUnavailableError, match=r"'t': did not open within 3 s; .* open_timeout_s"):
        await tier.__aenter__()


async def test_a_timeout_of_the_tier_itself_at_opening_is_passed_on():
    class Failing(DictTier):
        async def __aenter__(self):
            raise TimeoutError("of its backend")

    tier = TierHandle(Failing(), name="t", timeout_s=5, logger=LimitedLogger(logging.getLogger("test")))
    with pytest.raises(TimeoutError, match="of its backend"):
        await tier.__aenter__()


@in_virtual_time
async def test_a_tier_that_never_closes_is_left_at_the_deadline(caplog):
    logger = LimitedLogger(logging.getLogger("test"))
    tier = TierHandle(_Stuck(opens=True), name="t", timeout_s=5, close_timeout_s=3, logger=logger)
    async with tier:
        pass
    assert "tier 't': did not close within 3 s" in caplog.text


@in_virtual_time
async def test_a_tier_that_never_closes_is_left_if_the_wait_for_an_abandoned_call_uses_up_the_time(caplog):
    ended = asyncio.Event()

    class Late(_Stuck):
        async def get(self, key, allocate):
            await wait_done(asyncio.ensure_future(ended.wait()))

    logger = LimitedLogger(logging.getLogger("test"))
    tier = TierHandle(Late(opens=True), name="t", timeout_s=5, close_timeout_s=0, logger=logger)
    async with tier:
        with pytest.raises(TierUnavailableError, match="did not answer in 5 s"):
            await tier.get([KEY], allocator(small_arena(1)))
        assert tier.late_calls == 1
    ended.set()

    assert "tier 't': did not close within 0 s" in caplog.text


class _Stubborn(DictTier):
    """A tier that suppresses cancellation, as `in_thread` does while a thread runs, until `ended` is done.

    Attributes:
        events: Ends of `__aenter__` and `__aexit__`, with the task that has called them.
    """

    def __init__(self, *, opens):
        super().__init__()
        self.opens = opens
        self.ended = asyncio.get_running_loop().create_future()
        self.events = []

    async def __aenter__(self):
        if not self.opens:
            await wait_done(self.ended)
        self.events.append(("opened", asyncio.current_task()))
        return self

    async def __aexit__(self, *_):
        if self.opens:
            await wait_done(self.ended)
        self.events.append(("closed", asyncio.current_task()))


@in_virtual_time
async def test_a_tier_that_opens_after_the_deadline_because_it_suppresses_cancellation_is_closed_again():
    inner = _Stubborn(opens=False)
    logger = LimitedLogger(logging.getLogger("test"))
    tier = TierHandle(inner, name="t", timeout_s=5, open_timeout_s=3, logger=logger)
    with pytest.raises(TierUnavailableError, match=r"'t': did not open within 3 s"):
        await tier.__aenter__()
    inner.ended.set_result(None)
    await turns(5)

    assert [event for event, _ in inner.events] == ["opened", "closed"]


@in_virtual_time
async def test_a_tier_that_never_closes_is_left_although_it_suppresses_cancellation(caplog):
    inner = _Stubborn(opens=True)
    logger = LimitedLogger(logging.getLogger("test"))
    tier = TierHandle(inner, name="t", timeout_s=5, close_timeout_s=3, logger=logger)
    async with tier:
        pass
    assert "tier 't': did not close within 3 s; it is abandoned" in caplog.text
    inner.ended.set_result(None)


async def test_a_tier_is_opened_and_closed_by_one_task():
    inner = _Stubborn(opens=True)
    inner.ended.set_result(None)
    tier = TierHandle(inner, name="t", timeout_s=5, logger=LimitedLogger(logging.getLogger("test")))
    for call in (tier.__aenter__, tier.__aexit__):
        await asyncio.ensure_future(call())

    (first, opened_by), (last, closed_by) = inner.events
    assert (first, last) == ("opened", "closed")
    assert opened_by is closed_by


async def test_an_opening_that_is_cancelled_at_any_moment_leaves_no_open_tier():
    for number in range(8):  # iterations of the loop before the cancellation
        inner = _Stubborn(opens=True)
        inner.ended.set_result(None)
        tier = TierHandle(inner, name="t", timeout_s=5, logger=LimitedLogger(logging.getLogger("test")))
        opening = asyncio.ensure_future(tier.__aenter__())
        await turns(number)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            await tier.__aexit__()

        assert [event for event, _ in inner.events] in ([], ["opened", "closed"])


@in_virtual_time
async def test_a_closing_that_is_cancelled_waits_until_the_tier_has_cleaned_up():
    cleaned_up = asyncio.Event()

    class Slow(_Stuck):
        async def __aexit__(self, *_):
            try:
                await super().__aexit__()
            finally:
                await asyncio.sleep(1)
                cleaned_up.set()

    logger = LimitedLogger(logging.getLogger("test"))
    tier = TierHandle(Slow(opens=True), name="t", timeout_s=5, close_timeout_s=3, logger=logger)
    await tier.__aenter__()
    closing = asyncio.ensure_future(tier.__aexit__())
    await turns(3)
    closing.cancel()
    await asyncio.wait({closing})

    assert closing.cancelled()
    assert cleaned_up.is_set()


@pytest.mark.parametrize(
    ("answer", "layered", "found"),
    [(1, False, 1), (None, False, None), (3, False, None), (ValueError("odd"), False, None), (1, True, None)],
    ids=["number", "unknown", "more than the keys", "error", "other layer"],
)
def test_only_a_valid_answer_of_a_tier_without_other_layers_is_a_count_in_memory(answer, layered, found):
    class InArena(DictTier):
        @property
        def capabilities(self):
            return Capabilities(in_arena=True)

        def count_in_memory(self, keys):
            if isinstance(answer, Exception):
                raise answer
            return answer

    logger = LimitedLogger(logging.getLogger("test"))
    layers = [MetricsLayer(LayerConfig(), context()), *[_Broken(None)] * layered]
    tier = TierHandle(InArena(), name="t", timeout_s=5, logger=logger, layers=layers)

    assert tier.count_in_memory([KEY, KEY]) == found


@pytest.mark.parametrize(
    ("answer", "layered", "found"),
    [
        (True, False, True),
        (False, False, False),
        ("yes", False, False),
        (ValueError("odd"), False, False),
        (True, True, False),
    ],
    ids=["lacking", "unknown", "no answer", "error", "third-party layer"],
)
def test_only_a_valid_answer_of_a_tier_without_other_layers_is_a_certain_miss(answer, layered, found):
    class Knowing(DictTier):
        def lacks(self, key):
            if isinstance(answer, Exception):
                raise answer
            return answer

    logger = LimitedLogger(logging.getLogger("test"))
    layers = [MetricsLayer(LayerConfig(), context()), *[_Broken(None)] * layered]

    assert TierHandle(Knowing(), name="t", timeout_s=5, logger=logger, layers=layers).lacks(KEY) is found


class _Broken(Layer):
    """A third-party layer that passes each call to a function."""

    def __init__(self, do):
        super().__init__(LayerConfig(), context())
        self._do = do

    async def around(self, call, next):
        return await self._do(call, next)


@in_virtual_time
async def test_a_layers_answer_after_the_deadline_is_released(arena):
    """The result of a layer inside of the deadline that continues after its cancellation."""
    answers = []  # references, so that garbage collection releases no buffer

    async def answers_late(call, next):
        answers.extend(await next(call))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return list(answers)

    inner = DictTier()
    inner.records[KEY] = b"abc"
    deadline = DeadlineLayer(DeadlineConfig(), context(timeout_s=0.01))
    tier = LayeredTier(inner, deadline, _Broken(answers_late), timeout_s=0.01)
    with pytest.raises(TierUnavailableError):
        await tier.get(KEY, allocator(arena))
    while tier.late_calls:
        await asyncio.sleep(0)

    assert [buffer.released for buffer in answers] == [True]


INVALID_RESULTS = {"None": None, "an int": 1, "a list of objects": [object()]}


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("result", INVALID_RESULTS.values(), ids=INVALID_RESULTS)
async def test_a_layer_with_an_invalid_result_is_an_error(arena, result, bounded):
    async def returns(call, next):
        return result

    for outer in ([], [RetryLayer(RetryConfig(), context())]):
        layer = _Broken(returns)
        layer.bounded = bounded
        tier = LayeredTier(DictTier(), *outer, layer).handle

        for call in (tier.lookup([KEY]), tier.remove(KEY)):
            with pytest.raises(TierError):
                await call
        try:
            [error] = await tier.get([KEY], allocator(arena))
        except TierError as raised:
            error = raised
        assert isinstance(error, TierError)
        with arena.lease_nowait(10) as buffer:
            [error] = await tier.put([(KEY, buffer)])
        assert isinstance(error, TierError)


async def _twice(call, next):
    return [*await next(call), *await next(call)]


async def _releases(call, next):
    results = await next(call)
    results[0].release()
    return results


async def _repeats(call, next):
    [buffer] = await next(call.part([0]))
    return [buffer, buffer]


@pytest.mark.parametrize(
    ("do", "failed"), [(_twice, [True, True]), (_releases, [True, False]), (_repeats, [False, True])]
)
async def test_a_layer_with_wrong_buffers_is_an_error_of_their_chunks_and_the_others_are_released(
    arena, do, failed
):
    inner = fill(DictTier(), 2)
    tier = LayeredTier(inner, _Broken(do))

    try:
        results = await tier.get_many(list(inner.records), allocator(arena))
    except TierError as error:
        results = [error] * 2
    release_results(results)

    assert [isinstance(result, TierError) for result in results] == failed


async def test_a_layer_whose_statistics_fail_has_none():
    class Failing(_Broken):
        def statistics(self):
            raise ValueError("odd")

    handle = LayeredTier(DictTier(), Failing(None), BreakerLayer(BreakerConfig(), context(layer="b"))).handle

    assert list(handle.layer_statistics()) == ["b"]


@pytest.mark.parametrize("bounded", [False, True])
async def test_a_layer_with_too_many_results_of_a_retry_leaks_none(arena, bounded):
    calls = []

    async def twice(call, next):
        calls.append(call)
        if len(calls) == 1:
            return [TierUnavailableError("once"), *await next(call.part([1]))]
        return [*await next(call), *await next(call)]

    inner = fill(DictTier(), 2)
    retry = RetryLayer(RetryConfig(base_s=0.001), context())
    layer = _Broken(twice)
    layer.bounded = bounded
    tier = LayeredTier(inner, retry, layer)

    results = await tier.get_many(list(inner.records), allocator(arena))
    release_results(results)
    assert len(calls) == 2
    assert len(results) == 2
    assert isinstance(results[0], TierError)


@pytest.mark.parametrize("bounded", [False, True])
async def test_results_of_a_part_are_not_those_of_another(arena, bounded):
    async def uneven(call, next):
        results = await next(call)
        if call.keys[0] == key(0):
            return [*results, None]
        release_results(results)
        return results[1:]

    inner = fill(DictTier(), 4)
    limit = LimitLayer(LimitConfig(max_bytes=2 * 4096), context())
    layer = _Broken(uneven)
    layer.bounded = bounded
    tier = LayeredTier(inner, limit, layer)
    tier.bind(arena)

    results = await tier.get_many(list(inner.records), allocator(arena))
    assert [isinstance(result, TierError) for result in results] == [True] * 4


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
async def test_no_exception_of_a_layer_ends_the_loop_or_the_callers_task(arena, error, bounded):
    async def raises(call, next):
        raise error

    layer = _Broken(raises)
    layer.bounded = bounded
    tier = LayeredTier(DictTier(), layer).handle

    with pytest.raises(TierError, match=f"get_many raised {error.__name__}"):
        await tier.get([KEY], allocator(arena))
    with arena.lease_nowait(10) as buffer:
        [failure] = await tier.put([(KEY, buffer)])
    assert isinstance(failure, TierError)


@in_virtual_time
async def test_a_layer_that_hangs_ends_at_the_deadline_wherever_it_is():
    async def hangs(call, next):
        await asyncio.Event().wait()

    breaker = BreakerLayer(BreakerConfig(min_calls=1, window_calls=1), context(timeout_s=3))
    for layers in (
        [_Broken(hangs)],
        [_Broken(hangs), DeadlineLayer(DeadlineConfig(), context(timeout_s=3))],
        [MetricsLayer(LayerConfig(), context()), breaker, _Broken(hangs)],
        [_Broken(lambda call, next: next(call)), breaker, _Broken(hangs)],
    ):
        tier = LayeredTier(DictTier(), *layers, timeout_s=3)
        with pytest.raises(TierUnavailableError, match=r"'t': contains_many did not answer in 3 s"):
            await tier.contains(KEY)


def names(layers):
    handle = LayeredTier(DictTier(), *layers).handle
    return [type(layer).__name__ for layer in handle.layers]


def test_the_deadline_is_where_it_is_listed_or_outside_of_layers_that_may_wait():
    metrics = MetricsLayer(LayerConfig(), context())
    deadline = DeadlineLayer(DeadlineConfig(), context())
    foreign = _Broken(None)

    assert names([]) == ["DeadlineLayer"]
    assert names([metrics]) == ["MetricsLayer", "DeadlineLayer"]
    assert names([metrics, deadline, foreign]) == ["MetricsLayer", "DeadlineLayer", "_Broken"]
    assert names([metrics, foreign]) == ["MetricsLayer", "DeadlineLayer", "_Broken"]
    assert names([metrics, foreign, deadline]) == [
        "MetricsLayer",
        "DeadlineLayer",
        "_Broken",
        "DeadlineLayer",
    ]


class _Own(DictTier):
    """A tier that returns leases of its own memory, also if it is cancelled meanwhile."""

    def __init__(self, arena):
        super().__init__()
        self.arena = arena

    @property
    def capabilities(self):
        return Capabilities(own_memory=True)

    async def get_many(self, keys, allocate):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return [self.arena.lease_nowait(10) for _ in keys]


async def test_a_cancelled_read_of_a_tiers_own_memory_leaks_no_lease(arena):
    tier = LayeredTier(_Own(arena))
    task = asyncio.ensure_future(tier.get(KEY, allocator(arena)))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await tier.drain(timeout_s=5)


class _Outer(AroundLayer):
    """A layer of version 0.1."""

    async def around(self, call, run):
        assert call.nbytes == sum(buffer.nbytes for buffer in call.given)
        return await run()


class _Derived(_Outer):
    async def around(self, call, run):
        return await super().around(call, run)


async def test_a_layer_of_version_0_1_can_call_that_of_its_base_class(arena):
    inner = fill(DictTier(), 1)
    tier = LayeredTier(inner, _Derived(LayerConfig(), context()))

    (found,) = await tier.get_many(list(inner.records), allocator(arena))
    with found:
        await tier.put(KEY, found)


async def test_a_batch_does_not_wait_for_memory_again_for_every_chunk():
    waits = []

    async def allocate(nbytes):
        waits.append(nbytes)
        await asyncio.sleep(0)
        raise BudgetExceededError(f"no {nbytes} bytes for this test")

    inner = DictTier()
    keys = [ChunkKey(bytes([number]) * 16) for number in range(20)]
    inner.records = {key: bytes(10) for key in keys[:19]} | {keys[19]: bytes(9)}
    results = await guard(inner).get_many(keys, allocate)

    at_once = inner.capabilities.max_concurrency
    assert waits == [10] * at_once + [9]  # a smaller record may still get memory
    assert all(memory_was_short(result) for result in results)
