"""The breaker: its state machine without time or I/O, and around a tier which errors count and which calls are refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
from lmcache_async.tiers.middleware.breaker import BreakerConfig, BreakerLayer, Circuit, CircuitState
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
async def test_misses_are_not_failures(arena):
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
async def test_chunks_without_arena_memory_are_no_failures_of_the_tier(arena):
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
async def test_slow_reads_count_as_failures_but_return_their_results(arena):
    inner = fill(ToldTier(), 4)
    tier = broken_by(inner)
    for seconds in (3.9, 3.9, 4.0, 4.0):
        inner.told.append(seconds)
        assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)

    assert states(tier)[1] is OPEN


@in_virtual_time
async def test_slow_writes_are_failures_only_with_slow_write_s(arena):
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
async def test_lookups_in_a_local_index_hide_no_failures_and_are_no_probes(arena):
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
async def test_clear_and_keys_are_never_refused():
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


# The state machine.

RULES = BreakerConfig(
    window_calls=6,
    window_s=30.0,
    min_calls=3,
    failure_rate=0.5,
    pause_s=4.0,
    max_pause_s=16.0,
    probes=2,
)
OVERDUE_S = 10.0


def call_at(circuit: Circuit, now: float, *, failed: bool | None) -> bool:
    permit = circuit.enter(now)
    if permit is None:
        return False
    circuit.leave(permit, now, failed=failed)
    return True


def opened_circuit(now: float = 0.0) -> Circuit:
    circuit = Circuit(RULES, OVERDUE_S)
    for _ in range(3):
        assert call_at(circuit, now, failed=True)
    assert circuit.statistics(now).state is OPEN
    return circuit


def state_of(circuit: Circuit, now: float) -> CircuitState:
    return circuit.statistics(now).state


def test_open_it_refuses_until_the_pause_is_over_then_lets_a_few_pass():
    circuit = opened_circuit()

    assert not call_at(circuit, 3.9, failed=False)
    assert circuit.wait_s(3.0) == 1.0
    first, second = circuit.enter(4.0), circuit.enter(4.0)
    assert first
    assert second
    assert circuit.enter(4.0) is None
    assert state_of(circuit, 4.0) is HALF_OPEN
    circuit.leave(first, 5.0, failed=False)
    assert circuit.enter(5.0) is None  # the second one may still fail
    circuit.leave(second, 5.0, failed=False)
    assert state_of(circuit, 5.0) is CLOSED
    assert circuit.statistics(5.0).refused == 3


def test_a_probe_that_fails_opens_it_again_for_twice_as_long_up_to_a_bound_and_success_resets_it():
    circuit = opened_circuit()
    now = 0.0
    for pause in (4.0, 8.0, 16.0, 16.0):
        assert not circuit.admits(now + pause - 0.1)
        now += pause
        assert call_at(circuit, now, failed=True)
        assert state_of(circuit, now) is OPEN
    now += 16.0
    for _ in range(2):
        assert call_at(circuit, now, failed=False)
    for _ in range(3):
        assert call_at(circuit, now, failed=True)
    assert not circuit.admits(now + 3.9)
    assert circuit.admits(now + 4.0)


def test_a_call_admitted_before_the_circuit_opened_does_not_count():
    circuit = Circuit(RULES, OVERDUE_S)
    late = circuit.enter(0.0)
    for _ in range(3):
        call_at(circuit, 0.0, failed=True)
    assert late
    assert call_at(circuit, 4.0, failed=False)
    circuit.leave(late, 4.0, failed=True)

    assert state_of(circuit, 4.0) is HALF_OPEN
    assert call_at(circuit, 4.0, failed=False)
    assert state_of(circuit, 4.0) is CLOSED


rules = st.builds(
    BreakerConfig,
    window_calls=st.integers(3, 12),
    window_s=st.sampled_from([5.0, 50.0]),
    min_calls=st.integers(1, 3),
    failure_rate=st.sampled_from([0.1, 0.5, 1.0]),
    pause_s=st.sampled_from([1.0, 4.0]),
    max_pause_s=st.sampled_from([4.0, 30.0]),
    probes=st.integers(1, 3),
)


class CircuitMachine(RuleBasedStateMachine):
    """Any calls at any times: the breaker's guarantees hold at every step, compared with a model with full history."""

    def __init__(self):
        super().__init__()
        self.rules = None
        self.now = 0.0

    @precondition(lambda self: self.rules is None)
    @rule(rules=rules, overdue_s=st.sampled_from([2.0, 20.0]))
    def begin(self, rules, overdue_s):
        self.rules = rules
        self.overdue_s = overdue_s
        self.circuit = Circuit(rules, overdue_s)
        self.running = []
        self.outcomes = []  # since it was closed last: (time, failed)
        self.was = CLOSED
        self.probes = 0  # successes since it was half-open
        self.opened_at = 0.0

    @precondition(lambda self: self.rules)
    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]))
    def wait(self, seconds):
        """Overdue calls fail one by one at the next check."""
        self.now += seconds
        self.look()

    @precondition(lambda self: self.rules)
    @rule()
    def enter(self):
        self.look()
        admits = self.circuit.admits(self.now)
        permit = self.circuit.enter(self.now)
        assert (permit is not None) == admits
        if self.was is CLOSED:
            assert permit is not None, "a closed circuit admits every call"
        elif self.was is OPEN:
            pause_over = self.now >= self.opened_at + self.rules.pause_s
            assert pause_over or permit is None, "an open circuit admits no call before its pause is over"
        if permit is None:
            return
        if self.was is OPEN:
            self.was, self.probes, self.running = HALF_OPEN, 0, []
        self.running.append((self.now, permit))
        if self.was is HALF_OPEN:
            assert len(self.running) + self.probes <= self.rules.probes, "more probes than allowed"

    @precondition(lambda self: self.rules and self.running)
    @rule(data=st.data(), failed=st.sampled_from([True, False, None]))
    def leave(self, data, failed):
        self.look()
        if not self.running:
            return
        index = data.draw(st.integers(0, len(self.running) - 1))
        _, permit = self.running.pop(index)
        self.circuit.leave(permit, self.now, failed=failed)
        if failed is not None:
            self.decide(failed)

    def look(self):
        overdue = [one for one in self.running if self.now - one[0] >= self.overdue_s]
        self.circuit.admits(self.now)
        for one in overdue:
            if one in self.running:  # otherwise it opened before this check
                self.running.remove(one)
                self.decide(failed=True)

    def decide(self, failed):
        if self.was is HALF_OPEN:
            self.probes += not failed
            if failed:
                self.become_open()
            elif self.probes == self.rules.probes:
                self.was, self.outcomes, self.running = CLOSED, [], []
            return
        self.outcomes.append((self.now, failed))
        last = [one for one in self.outcomes if self.now - one[0] <= self.rules.window_s]
        last = [bad for _, bad in last[-self.rules.window_calls :]]
        if failed and len(last) >= self.rules.min_calls and sum(last) >= self.rules.failure_rate * len(last):
            self.become_open()

    def become_open(self):
        self.was, self.opened_at, self.outcomes, self.running = OPEN, self.now, [], []

    @precondition(lambda self: self.rules)
    @invariant()
    def is_as_the_model_says(self):
        assert self.circuit.statistics(self.now).state is self.was

    @precondition(lambda self: self.rules)
    @rule()
    def a_tier_that_is_well_is_served_again_in_the_end(self):
        copy = Circuit(self.rules, self.overdue_s)
        copy.__dict__.update({name: _copied(value) for name, value in vars(self.circuit).items()})
        now = self.now
        for _ in range(2 * self.rules.probes + 2):
            now += max(self.rules.max_pause_s, self.rules.pause_s, self.overdue_s)
            for _ in range(self.rules.probes):
                call_at(copy, now, failed=False)
        assert copy.statistics(now).state is CLOSED


def _copied(value):
    return value.copy() if isinstance(value, dict | deque) else value


TestCircuitMachine = CircuitMachine.TestCase
