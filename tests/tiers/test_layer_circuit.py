"""The breaker's state machine, without time or I/O."""

from __future__ import annotations

from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_async.tiers.middleware.breaker import BreakerConfig, Circuit, CircuitState

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


def call(circuit: Circuit, now: float, *, failed: bool | None) -> bool:
    permit = circuit.enter(now)
    if permit is None:
        return False
    circuit.leave(permit, now, failed=failed)
    return True


def opened(now: float = 0.0) -> Circuit:
    circuit = Circuit(RULES, OVERDUE_S)
    for _ in range(3):
        assert call(circuit, now, failed=True)
    assert circuit.statistics(now).state is CircuitState.OPEN
    return circuit


def state(circuit: Circuit, now: float) -> CircuitState:
    return circuit.statistics(now).state


def test_open_it_refuses_until_the_pause_is_over_then_lets_a_few_pass():
    circuit = opened()

    assert not call(circuit, 3.9, failed=False)
    assert circuit.wait_s(3.0) == 1.0
    first, second = circuit.enter(4.0), circuit.enter(4.0)
    assert first
    assert second
    assert circuit.enter(4.0) is None
    assert state(circuit, 4.0) is CircuitState.HALF_OPEN
    circuit.leave(first, 5.0, failed=False)
    assert circuit.enter(5.0) is None  # the second one may still fail
    circuit.leave(second, 5.0, failed=False)
    assert state(circuit, 5.0) is CircuitState.CLOSED
    assert circuit.statistics(5.0).refused == 3


def test_a_probe_that_fails_opens_it_again_for_twice_as_long_up_to_a_bound_and_success_resets_it():
    circuit = opened()
    now = 0.0
    for pause in (4.0, 8.0, 16.0, 16.0):
        assert not circuit.admits(now + pause - 0.1)
        now += pause
        assert call(circuit, now, failed=True)
        assert state(circuit, now) is CircuitState.OPEN
    now += 16.0
    for _ in range(2):
        assert call(circuit, now, failed=False)
    for _ in range(3):
        assert call(circuit, now, failed=True)
    assert not circuit.admits(now + 3.9)
    assert circuit.admits(now + 4.0)


def test_a_call_from_before_it_opened_decides_nothing_later():
    circuit = Circuit(RULES, OVERDUE_S)
    late = circuit.enter(0.0)
    for _ in range(3):
        call(circuit, 0.0, failed=True)
    assert late
    assert call(circuit, 4.0, failed=False)
    circuit.leave(late, 4.0, failed=True)

    assert state(circuit, 4.0) is CircuitState.HALF_OPEN
    assert call(circuit, 4.0, failed=False)
    assert state(circuit, 4.0) is CircuitState.CLOSED


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
        self.was = CircuitState.CLOSED
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
        if self.was is CircuitState.CLOSED:
            assert permit is not None, "a closed circuit admits every call"
        elif self.was is CircuitState.OPEN:
            pause_over = self.now >= self.opened_at + self.rules.pause_s
            assert pause_over or permit is None, "an open circuit admits no call before its pause is over"
        if permit is None:
            return
        if self.was is CircuitState.OPEN:
            self.was, self.probes, self.running = CircuitState.HALF_OPEN, 0, []
        self.running.append((self.now, permit))
        if self.was is CircuitState.HALF_OPEN:
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
        if self.was is CircuitState.HALF_OPEN:
            self.probes += not failed
            if failed:
                self.become_open()
            elif self.probes == self.rules.probes:
                self.was, self.outcomes, self.running = CircuitState.CLOSED, [], []
            return
        self.outcomes.append((self.now, failed))
        last = [one for one in self.outcomes if self.now - one[0] <= self.rules.window_s]
        last = [bad for _, bad in last[-self.rules.window_calls :]]
        if failed and len(last) >= self.rules.min_calls and sum(last) >= self.rules.failure_rate * len(last):
            self.become_open()

    def become_open(self):
        self.was, self.opened_at, self.outcomes, self.running = CircuitState.OPEN, self.now, [], []

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
                call(copy, now, failed=False)
        assert copy.statistics(now).state is CircuitState.CLOSED


def _copied(value):
    return value.copy() if isinstance(value, dict | deque) else value


TestCircuitMachine = CircuitMachine.TestCase
