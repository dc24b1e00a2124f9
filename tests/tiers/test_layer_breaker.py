"""The breaker: its state machine without time or I/O, and around a tier which errors count and which calls are refused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    ScriptedTier,
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
        inner.script.append(error or away())
        with pytest.raises((TierError, BudgetExceededError)):
            await tier.get(KEYS[0], None)


@in_virtual_time
async def test_after_failures_calls_fail_at_once_and_after_the_pause_the_breaker_closes_again(arena, caplog):
    caplog.set_level("INFO")
    inner = fill(ScriptedTier(), 4)
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
        "tier 't': reads failed or were slow and are suspended: they are misses until a probe succeeds",
        "tier 't': reads work again",
    ]


@in_virtual_time
async def test_while_reads_fail_lookups_are_refused_and_writes_continue(arena):
    inner = ScriptedTier()
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
async def test_while_writes_fail_reads_continue(arena):
    inner = fill(ScriptedTier(), 4)
    tier = broken_by(inner)
    items = chunks(arena, 2)
    for _ in range(2):
        inner.script.append(away())
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
    inner = fill(ScriptedTier(), 4)
    tier = broken_by(inner)
    await fail_reads(tier, inner)
    await asyncio.sleep(5)
    assert await tier.contains(KEYS[0])  # only a hit counts as a probe
    inner.script.append(1)
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
    inner = ScriptedTier()
    tier = broken_by(inner)
    await fail_reads(tier, inner, count=2, error=error)

    assert states(tier)[1] is (OPEN if counts else CLOSED)


@in_virtual_time
async def test_misses_are_not_failures(arena):
    tier = broken_by(ScriptedTier())
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
    inner = fill(ScriptedTier(), 4)
    tier = broken_by(inner)
    for _ in range(2):
        for one in KEYS[:failed]:
            inner.chunk_errors[one].append(away())
        results = await tier.get_many(KEYS, allocator(arena))
        assert [isinstance(taken(result), bytes) for result in results] == [False] * failed + [True] * (
            4 - failed
        )

    assert states(tier)[1] is (OPEN if opens else CLOSED)
    assert tier.layer_statistics().read.calls == (0 if opens else 2)


@in_virtual_time
async def test_chunks_without_arena_memory_are_no_failures_of_the_tier(arena):
    class NoMemory(ScriptedTier):
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
    inner = fill(ScriptedTier(), 4)
    tier = broken_by(inner)
    for seconds in (3.9, 3.9, 4.0, 4.0):
        inner.script.append(seconds)
        assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)

    assert states(tier)[1] is OPEN


@in_virtual_time
async def test_slow_writes_are_failures_only_with_slow_write_s(arena):
    for options, state in (({}, CLOSED), ({"slow_write_s": 4}, OPEN)):
        inner = ScriptedTier()
        tier = broken_by(inner, **options)
        with chunk(arena, 1) as buffer:
            for _ in range(2):
                inner.script.append(20)
                await tier.put(key(1), buffer)
        assert states(tier)[2] is state


@in_virtual_time
async def test_a_call_cancelled_early_does_not_count_and_one_cancelled_late_is_a_failure():
    for seconds, state in ((3.9, CLOSED), (4.0, OPEN)):
        inner = ScriptedTier()
        tier = broken_by(inner)
        for _ in range(2):
            inner.script.append(HANG)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await tier.get(KEYS[0], None)
        assert states(tier)[1] is state
        assert tier.layer_statistics().read.calls == 0


@in_virtual_time
async def test_a_corrupt_record_is_rejected_also_while_writes_are_suspended():
    inner = fill(ScriptedTier(), 2)
    tier = broken_by(inner)
    for _ in range(2):
        inner.script.append(away())
        with pytest.raises(TierUnavailableError):
            await tier.remove(KEYS[1])

    assert await tier.reject(KEYS[0], "checksum")
    assert not await tier.contains(KEYS[0])
    with pytest.raises(TierSuspendedError):
        await tier.remove(KEYS[1])
    assert states(tier)[2] is OPEN


@in_virtual_time
async def test_a_write_that_misses_the_tiers_deadline_has_failed():
    inner = ScriptedTier()
    tier = broken_by(inner, timeout_s=10)
    for _ in range(2):
        inner.script.append(HANG)
        with pytest.raises(TierUnavailableError, match="did not answer in 10"):
            await tier.remove(KEYS[0])

    assert states(tier)[2] is OPEN


@in_virtual_time
async def test_calls_that_cannot_be_cancelled_open_the_breaker_too():
    may_end = asyncio.Event()

    class Stuck(ScriptedTier):
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
    inner = fill(ScriptedTier(far=False), 4)
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
    inner = fill(ScriptedTier(), 4)
    tier = broken_by(inner)
    await fail_reads(tier, inner)

    assert len([one async for one in tier.keys()]) == 4  # noqa: SIM118 - no dict
    assert await tier.clear() == 4


async def test_statistics_can_be_read_from_outside_of_the_loop():
    tier = broken_by(ScriptedTier())
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


@in_virtual_time
async def test_lookups_that_exceed_the_limit_of_a_deadline_layer_outside_are_failures():
    inner = ScriptedTier()
    breaker = BreakerLayer(BreakerConfig(min_calls=2), context())
    tier = LayeredTier(inner, DeadlineLayer(DeadlineConfig(lookup_s=1), context()), breaker)
    for _ in range(2):
        inner.script.append(HANG)
        with pytest.raises(TierUnavailableError, match="did not answer in 1"):
            await tier.contains(KEYS[0])
        await tier.drain(timeout_s=1)

    assert breaker.statistics().lookup.state is OPEN


@pytest.mark.parametrize("outside", [False, True])
@in_virtual_time
async def test_a_call_that_had_little_time_left_after_a_wait_for_room_is_no_failure(arena, outside):
    inner = fill(ScriptedTier(), 4)
    inner.script.extend([25, 10])
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
    """Calls at any times, compared with a model that keeps the full history."""

    @initialize(rules=rules, overdue_s=st.sampled_from([2.0, 20.0]))
    def begin(self, rules, overdue_s):
        self.rules = rules
        self.overdue_s = overdue_s
        self.circuit = Circuit(rules, overdue_s)
        self.now = self.until = 0.0
        self.pause_s = rules.pause_s
        self.opened = self.refused = 0
        self.late = []  # permits that do not count any more
        self.running = []
        self.become(CLOSED)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0]))
    def wait(self, seconds):
        self.now += seconds
        self.look()

    @rule()
    def enter(self):
        self.look()
        admitted = {
            CLOSED: True,
            OPEN: self.now >= self.until,
            HALF_OPEN: len(self.running) + self.probes < self.rules.probes,
        }[self.was]

        assert self.circuit.admits(self.now) == admitted
        permit = self.circuit.enter(self.now)

        assert (permit is not None) == admitted
        if not admitted:
            self.refused += 1
            return
        if self.was is OPEN:
            self.become(HALF_OPEN)
        self.running.append((self.now, permit))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.sampled_from([True, False, None]))
    def leave(self, data, failed):
        self.look()
        if not self.running:
            return
        _, permit = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.circuit.leave(permit, self.now, failed=failed)
        if failed is not None:
            self.decide(failed)

    @rule(count=st.integers(1, 4), failed=st.booleans())
    def call(self, count, failed):
        """Calls that end at once, so that a run passes through many states."""
        for _ in range(count):
            self.look()
            before = len(self.running)
            self.enter()
            if len(self.running) > before:
                self.circuit.leave(self.running.pop()[1], self.now, failed=failed)
                self.decide(failed)

    @precondition(lambda self: self.late)
    @rule(failed=st.booleans())
    def leave_late(self, failed):
        """The call was overdue, or was admitted in an earlier state."""
        self.look()
        self.circuit.leave(self.late.pop(0), self.now, failed=failed)

    def look(self):
        """Overdue calls fail one by one at the next check."""
        overdue = [one for one in self.running if self.now - one[0] >= self.overdue_s]
        self.circuit.admits(self.now)
        for one in overdue:
            if one in self.running:  # otherwise it opened before this check
                self.running.remove(one)
                self.late.append(one[1])
                self.decide(failed=True)

    def decide(self, failed):
        if self.was is HALF_OPEN:
            self.probes += not failed
            if failed:
                self.pause_s = min(2 * self.pause_s, self.rules.max_pause_s)
                self.become_open()
            elif self.probes == self.rules.probes:
                self.pause_s = self.rules.pause_s
                self.become(CLOSED)
            return
        self.outcomes.append((self.now, failed))
        last = [one for one in self.outcomes if self.now - one[0] <= self.rules.window_s]
        last = [bad for _, bad in last[-self.rules.window_calls :]]
        if failed and len(last) >= self.rules.min_calls and sum(last) >= self.rules.failure_rate * len(last):
            self.become_open()

    def become_open(self):
        self.become(OPEN)
        self.opened += 1
        self.until = self.now + self.pause_s

    def become(self, state):
        self.late += [permit for _, permit in self.running]
        self.was, self.running, self.outcomes = state, [], []
        self.probes = 0  # successes since it was half-open

    @invariant()
    def is_as_the_model_says(self):
        statistics = self.circuit.statistics(self.now)
        found = (statistics.state, statistics.opened, statistics.refused)
        assert found == (self.was, self.opened, self.refused)
        assert self.circuit.wait_s(self.now) == (max(0.0, self.until - self.now) if self.was is OPEN else 0.0)


TestCircuitMachine = CircuitMachine.TestCase
