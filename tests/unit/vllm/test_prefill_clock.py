"""Prefill speed of a model, measured on a simulated engine whose steps overlap."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.integration.vllm.load_policy import MIN_RUNS, MIN_STEP_TOKENS, PrefillClock

RATE = 10_000.0
"""Tokens per second of each stage of the simulated device."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be scheduled.

    Attributes:
        factor: Its duration relative to that at `RATE`.
        gap: Seconds that the engine is idle before it is scheduled.
        stall: Seconds between the end of the step and the call that reports it.
        reported: Whether the end is reported.
    """

    prompt: int = 0
    decodes: int = 0
    factor: float = 1.0
    gap: float = 0.0
    stall: float = 0.0
    reported: bool = True


class Engine:
    """vLLM's loop with a queue of batches, in virtual time, on a pipeline of stages.

    A step is scheduled while fewer than `depth` are in flight. Otherwise the engine waits for the oldest one.
    """

    def __init__(self, *, depth: int = 1, stages: int = 1, host_s: float = 0.0) -> None:
        self.time = 0.0
        self.clock = PrefillClock(lambda: self.time)
        self._depth = depth
        self._host_s = host_s
        self._free = [0.0] * stages  # time at which each stage becomes idle
        self._queue: deque[tuple[int, float, Step]] = deque()

    def run(self, *steps: Step) -> None:
        for step in steps:
            if step.gap:
                self.drain()
                self.time += step.gap
            self._plan(step)
            while len(self._queue) >= self._depth:
                self._wait()
        self.drain()

    def drain(self) -> None:
        while self._queue:
            self._wait()

    @property
    def rate(self) -> float:
        assert self.clock.known
        return 1e6 / self.clock.seconds(10**6)

    def _plan(self, step: Step) -> None:
        self.time += self._host_s
        tokens = step.prompt + step.decodes
        number = self.clock.begin(step.prompt, tokens)
        end = self.time
        for stage, free in enumerate(self._free):
            end = self._free[stage] = max(end, free) + tokens / RATE * step.factor
        self._queue.append((number, end, step))

    def _wait(self) -> None:
        number, end, step = self._queue.popleft()
        self.time = max(self.time, end) + step.stall
        if number and step.reported:
            self.clock.end(number)


def near(rate: float) -> object:
    return pytest.approx(rate, rel=0.2)


prompts = st.builds(
    Step,
    prompt=st.integers(512, 4096),
    decodes=st.integers(0, 25),
    factor=st.floats(0.92, 1.08),
    gap=st.sampled_from([0.0, 0.0, 0.0, 0.001, 2.0]),
    stall=st.sampled_from([0.0, 0.0, 0.003]),
)
others = st.builds(
    Step,
    prompt=st.integers(0, MIN_STEP_TOKENS - 1),
    decodes=st.integers(0, 64),
    factor=st.floats(0.1, 5),
    gap=st.sampled_from([0.0, 0.0, 0.5]),
)


@given(
    st.lists(st.one_of(prompts, others), max_size=80),
    st.lists(prompts, min_size=8 * MIN_RUNS, max_size=8 * MIN_RUNS),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.001]),
)
def test_the_rate_of_overlapping_steps_is_learnt(
    mixed: list[Step], more: list[Step], depth: int, host_s: float
):
    engine = Engine(depth=depth, host_s=host_s)
    engine.run(*mixed, *more)

    assert engine.rate == near(RATE)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [0, 1])
def test_a_full_pipeline_is_measured_at_the_pace_of_its_slowest_stage(stages: int, more: int):
    engine = Engine(depth=stages + more, stages=stages)
    engine.run(*[Step(2048)] * 60)

    assert engine.rate == near(RATE)


@given(st.lists(st.one_of(prompts, others), min_size=60, max_size=90), st.integers(1, 4), st.integers(0, 1))
def test_a_pipeline_that_runs_empty_is_measured_between_one_prompt_alone_and_a_full_pipeline(
    steps: list[Step], stages: int, more: int
):
    engine = Engine(depth=stages + more, stages=stages)
    engine.run(*steps, *[Step(2048, gap=1.0)] * MIN_RUNS)

    assert 0.8 * RATE / stages <= engine.rate <= 1.2 * RATE


ALONE, SLOW_FIRST = Step(2048, gap=1.0), Step(2048, factor=50, gap=1.0)
FAST, SLOW = Step(2048, factor=0.25, gap=1.0), Step(2048, factor=4, gap=1.0)


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([Step(decodes=200), Step(decodes=200), Step(2048)] * 8, RATE),
        ([FAST, SLOW] * 3 + [ALONE] * 3, RATE),
        ([Step(200, factor=10, gap=1.0)] * 6 + [Step(4096, gap=1.0)], RATE),
        ([SLOW_FIRST, *[ALONE] * (MIN_RUNS - 1)], RATE),
        ([ALONE] * 20 + [SLOW] * 10, RATE / 4),
    ],
    ids=[
        "between decodes",
        "single fast and slow runs",
        "long steps count more than short ones",
        "a slow first step is forgotten",
        "a change of the speed is followed",
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_prefill_rate_of_a_sequence_of_steps(steps: list[Step], rate: float, depth: int):
    engine = Engine(depth=depth)
    engine.run(*steps)

    assert engine.rate == pytest.approx(rate)


def test_one_prompt_after_the_other_is_measured_with_the_time_to_fill_the_pipeline():
    engine = Engine(depth=2, stages=2)
    engine.run(*[Step(1000, gap=1.0)] * 5)

    assert engine.rate == pytest.approx(RATE / 2)


def test_outputs_that_are_processed_at_once_are_measured_together():
    engine = Engine(depth=4)
    stalled = [Step(2000, stall=0.59), *[Step(2000)] * 3]  # three more end before the engine continues
    engine.run(*stalled * 30)

    assert engine.rate == near(RATE)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(
    "steps",
    [
        [ALONE] * (MIN_RUNS - 1),
        [Step(decodes=1000, factor=10), Step(MIN_STEP_TOKENS, 1000, factor=10)] * 20,
    ],
    ids=["few runs", "large batches of decodes"],
)
def test_steps_that_do_not_measure_the_prefill_speed(steps: list[Step], depth: int):
    engine = Engine(depth=depth)
    engine.run(*steps)

    assert (engine.clock.known, engine.clock.seconds(1000)) == (False, 0.0)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_ends_that_are_never_reported_make_no_step_longer_or_shorter(reported: list[bool], depth: int):
    engine = Engine(depth=depth)
    engine.run(*[Step(2048, reported=each) for each in reported])
    assert not engine.clock.known or engine.rate == pytest.approx(RATE)
    engine.run(*[Step(2048)] * (8 * MIN_RUNS + 1))

    assert engine.rate == pytest.approx(RATE)


def test_a_step_after_one_whose_end_was_not_reported_is_not_measured():
    engine = Engine(depth=2)
    engine.run(*[Step(2048, reported=False), Step(2048)] * 20)

    assert not engine.clock.known


@given(st.lists(st.integers(-5, 400)))
def test_numbers_of_unknown_steps_are_ignored(numbers: list[int]):
    time = [0.0]
    clock = PrefillClock(lambda: time[0])
    for number in numbers:
        clock.end(number)
        clock.begin(2048, 2048)

    assert not clock.known or clock.seconds(1) >= 0


def test_steps_without_tokens_have_no_number():
    clock = PrefillClock(lambda: 0.0)

    assert [clock.begin(0, 0), clock.begin(2048, 2048), clock.begin(0, 0), clock.begin(0, 1)] == [0, 1, 0, 2]


def test_a_fixed_rate_is_not_measured():
    time = itertools.count()
    fixed = PrefillClock(lambda: float(next(time)), 500.0)
    for _ in range(2 * MIN_RUNS):
        fixed.end(fixed.begin(2048, 2048))

    assert (fixed.known, fixed.seconds(1000)) == (True, 2.0)


@pytest.mark.parametrize("rate", [None, RATE], ids=["measured", "set by the user"])
def test_the_engine_is_idle_when_all_steps_with_tokens_have_ended(rate: float | None):
    clock = PrefillClock(lambda: 0.0, rate)
    assert clock.idle
    first, second = clock.begin(0, 1), clock.begin(500, 500)
    clock.end(first)
    clock.end(clock.begin(0, 0))
    assert not clock.idle
    clock.end(second)
    assert clock.idle
    _unreported, last = clock.begin(0, 1), clock.begin(0, 1)
    clock.end(last)
    assert clock.idle
