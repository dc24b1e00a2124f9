"""Calculations of the serve benchmark: mixed loads, gaps, throughput, equal answers."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.benchmarks.serve import (
    Mix,
    gap_ms,
    mixed,
    percentile,
    prompt,
    tokens_per_second,
)
from tools.benchmarks.serve_child import Served
from tools.benchmarks.serve_engine import Answer, Request, ServeError, check_cached, check_same, difference

MIX = Mix(streams=3, stream_tokens=40, new=5, repeated=2, prompt_tokens=20)


def answer(*places, tokens=None, sent=0.0, times=None, cached=0, reason="length"):
    """An answer with these log-probabilities; the most likely token of each position unless `tokens` is given."""
    chosen = tokens or [int(max(place, key=place.get)) for place in places]
    return Answer(sent, times or [0.0] * len(chosen), chosen, places, cached, reason)


def test_the_same_seed_makes_the_same_load():
    known = [[1, 2], [3, 4]]

    one, other = (mixed(MIX, known, random.Random(5), 100) for _ in range(2))

    assert one == other
    assert one != mixed(MIX, known, random.Random(6), 100)


def test_a_load_has_its_streams_first_and_each_known_prompt_once():
    known = [[1, 2], [3, 4]]

    requests = mixed(MIX, known, random.Random(5), 100)

    assert [request.after for request in requests[:3]] == [0, 0, 0]
    assert {request.max_tokens for request in requests[:3]} == {40}
    assert all(request.after > 0 for request in requests[3:])
    assert [request.prompt for request in requests if request.prompt in known] == known
    assert sum(len(request.prompt) == 20 for request in requests) == 5


@given(
    mix=st.builds(
        Mix,
        streams=st.integers(1, 8),
        stream_tokens=st.integers(1, 100),
        new=st.integers(0, 20),
        repeated=st.integers(0, 20),
        prompt_tokens=st.just(10),
    ),
    seed=st.integers(),
)
def test_every_prompt_comes_while_the_streams_decode(mix, seed):
    moments = mix.moments(random.Random(seed))

    assert sum(new for _, new in moments) == mix.new
    assert len(moments) == mix.new + mix.repeated
    assert [after for after, _ in moments] == sorted(after for after, _ in moments)
    assert all(1 <= after <= mix.streams * mix.stream_tokens for after, _ in moments)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(values, part):
    found = percentile(values, part)

    assert found in values
    assert sum(value <= found for value in values) >= part * len(values) - 1e-9
    assert sum(value < found for value in values) < part * len(values) + 1e-9


def test_gaps_are_those_of_each_answer():
    one = answer({"1": 0.0}, tokens=[1, 2, 3], times=[1.0, 1.5, 1.6])
    other = answer({"1": 0.0}, tokens=[1, 2], times=[9.0, 9.2])

    assert one.gaps_ms == pytest.approx([500, 100])
    assert gap_ms([one, other], 0.95) == pytest.approx(500)
    assert gap_ms([one, other], 0.5) == pytest.approx(200)
    # Both tokens were read at once.
    assert gap_ms([answer({"1": 0.0}, tokens=[1, 2], times=[1.0, 1.0])], 0.95) == pytest.approx(1e-3)


def test_throughput_counts_prompts_and_answers():
    answers = [answer({"1": 0.0}, sent=1.0, times=[2.0]), answer({"1": 0.0}, sent=0.0, times=[5.0])]

    assert tokens_per_second([Request([1] * 9, 1), Request([1] * 39, 1)], answers) == 10


def test_equal_answers_may_differ_by_rounding():
    check_same("it", answer({"5": -0.1, "6": -3.0}), answer({"5": -0.1001, "6": -3.0}), "float32")


@pytest.mark.parametrize(
    "other",
    [
        answer({"6": -0.1, "5": -3.0}),  # another token
        answer({"5": -0.2, "6": -3.0}),  # by more than rounding
        answer({"5": -0.1, "6": -3.0}, {"5": 0.0}),  # longer
        answer({"7": -0.1, "8": -3.0}, tokens=[5]),  # nothing to compare
        answer({"5": -0.1, "6": -3.0}, reason="error"),
    ],
)
def test_a_different_answer_is_an_error(other):
    with pytest.raises(ServeError, match=r"^it: the (answer differs|request ended)"):
        check_same("it", other, answer({"5": -0.1, "6": -3.0}), "float32")


def test_equally_likely_tokens_may_be_exchanged_and_later_tokens_are_not_compared():
    one = answer({"5": -0.7, "6": -0.7001}, {"9": -0.1})
    other = answer({"5": -0.7001, "6": -0.7}, {"3": -0.2})

    assert difference(one, other, 1e-3) == pytest.approx(1e-4)
    assert difference(one, other, 1e-5) == math.inf


@pytest.mark.parametrize(("cached", "fits"), [(511, False), (512, True), (513, True), (514, False)])
def test_a_hit_must_be_reported_as_cached(cached, fits):
    one = answer({"1": 0.0}, cached=cached)

    if fits:
        check_cached("it", one, least=512, most=513)
    else:
        with pytest.raises(ServeError, match=f"it: {cached} tokens came from a cache, expected 512"):
            check_cached("it", one, least=512, most=513)


def test_prompts_are_new_and_have_no_special_tokens():
    chosen = random.Random(1)
    one, other = (prompt(chosen, 500, 100) for _ in range(2))

    assert one != other
    assert min(one) >= 3
    assert max(one) < 100


class Streams:
    """An engine that streams tokens one at a time and records the arrival order of requests."""

    def __init__(self):
        self.came = []
        self.given = 0

    async def generate(self, prompt, sampling, name):
        [number] = prompt["prompt_token_ids"]
        self.came.append((number, self.given))
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0)  # yield to the other tasks
            self.given += number < 100
            yield _Output(number)


class _Output:
    def __init__(self, token):
        self.num_cached_tokens = 3
        self.outputs = [self]
        self.token_ids = [token]
        self.logprobs = [{token: self}]
        self.logprob = -0.5
        self.finish_reason = "length"


async def test_prompts_are_sent_once_the_streams_have_given_tokens_enough():
    streams = Streams()
    requests = [
        {"prompt": [1], "max_tokens": 6, "after": 0},
        {"prompt": [100], "max_tokens": 1, "after": 7},
        {"prompt": [2], "max_tokens": 6, "after": 0},
        {"prompt": [101], "max_tokens": 2, "after": 3},
        {"prompt": [102], "max_tokens": 1, "after": 99},
    ]

    answers = await Served(streams, requests, 1).run()

    came = dict(streams.came)
    assert came[1] <= came[2] < 3 <= came[101]
    assert came[100] >= 7
    assert came[102] == 12  # never due, but sent
    assert [given["tokens"] for given in answers] == [[1] * 6, [100], [2] * 6, [101] * 2, [102]]
    assert answers[3]["cached_tokens"] == 3
    assert len(answers[0]["times"]) == 6
    assert answers[0]["logprobs"][0] == {"1": -0.5}
