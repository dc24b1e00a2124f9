"""Load or compute: the decision, and its inputs."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.integration.vllm.load_policy import (
    LOCAL,
    MIN_GAIN,
    NO_PREFIX,
    Hit,
    LoadPolicy,
    PrefillClock,
    pack_costs,
    seconds_up_to,
    slowest,
    unpack_costs,
)

CHUNK = 100
REASONS = {"miss": NO_PREFIX, "local": LOCAL}


def decider(tokens_per_s=1000.0, **options):
    return LoadPolicy(PrefillClock(lambda: 0.0, tokens_per_s), CHUNK, **options)


def costs_of(*runs):
    """The costs of runs given as (chunks, seconds)."""
    ends, chunks, seconds = [], 0, 0.0
    for count, took in runs:
        chunks, seconds = chunks + count, seconds + took
        ends.append((chunks, seconds))
    return tuple(ends)


runs = st.lists(st.tuples(st.integers(1, 20), st.floats(0, 50)), max_size=6)


@pytest.mark.parametrize(
    ("costs", "chosen", "decided", "why"),
    [
        ([(10, 0.01)], 1000, "load", "0.011 s to the first token, 1.001 s without loading"),
        ([(10, 1.5)], 0, "recompute", "1.001 s to the first token, 1.501 s with all 1000 tokens loaded"),
        ([(10, 1.02)], 1000, "load", ""),  # not worth the device time
        ([(4, 0.01), (6, 5.0)], 400, "partial", "5.011 s with all of the hit loaded, 1.001 s with nothing"),
        ([(4, 5.0), (6, 0.01)], 0, "recompute", ""),  # a hit has no holes
        ([(4, 0.5), (6, 0.01)], 1000, "load", ""),  # a slow beginning compensated by the rest
        ([], 1000, "load", ""),  # no speed of any tier is known
    ],
)
def test_the_faster_choice_is_made_and_explained(costs, chosen, decided, why):
    chooser = decider()

    decision = chooser.decide("r", Hit(costs_of(*costs), 1000, 0, 1001))
    assert (decision.tokens, decision.decided) == (chosen, decided)
    assert why in decision.why


def test_vllms_own_hit_is_neither_loaded_nor_computed():
    slow = costs_of((4, 5.0), (6, 0.01))

    assert decider().decide("r", Hit(slow, 1000, 400, 1001)).tokens == 1000
    assert decider().decide("r", Hit(costs_of((10, 9.0)), 1000, 400, 1001)).tokens == 400


@pytest.mark.parametrize(
    ("tokens", "local", "decided"), [(0, 0, "miss"), (0, 500, "miss"), (300, 400, "local")]
)
def test_a_hit_that_has_nothing_to_load_is_not_decided(tokens, local, decided):
    chooser = decider()
    decision = chooser.decide("r", Hit(costs_of((4, 5.0)), tokens, local, 1001))

    assert (decision.decided, decision.tokens, decision.why) == (decided, tokens, REASONS[decided])


@pytest.mark.parametrize(
    ("options", "promised", "why"),
    [
        ({"always": True}, False, "vllm.load_policy is always"),
        ({}, True, "another vLLM instance has computed it for this one"),
        ({"tokens_per_s": None}, False, "the prefill speed is not known yet"),
    ],
)
def test_hits_that_are_loaded_regardless_of_their_cost(options, promised, why):
    hit = Hit(costs_of((10, 100.0)), 1000, 0, 1001)
    decision = decider(**options).decide("r", hit, promised=promised)

    assert (decision.decided, decision.tokens, decision.why) == ("load", 1000, why)


@given(runs, st.integers(0, 99), st.integers(0, 2500), st.integers(1, 500), st.floats(1, 1e5))
def test_the_choice_is_a_prefix_of_whole_runs_and_never_much_later_than_any_other(
    parts, partial, local, more, speed
):
    costs = costs_of(*parts)
    tokens = (costs[-1][0] * CHUNK if costs else 0) + partial
    hit = Hit(costs, tokens, local, tokens + local + more)

    chosen = decider(speed).decide("r", hit).tokens

    if tokens <= local:
        assert chosen == tokens
        return
    ends = {local, tokens, *(end * CHUNK for end, _ in costs if local < end * CHUNK < tokens)}
    assert chosen in ends

    def first_token(kept):
        load = 0.0
        if kept > local:
            load = seconds_up_to(costs, kept / CHUNK) - seconds_up_to(costs, local // CHUNK)
        return load + (hit.asked_tokens - kept) / speed

    assert first_token(chosen) * (1 - MIN_GAIN) <= min(map(first_token, ends)) + 1e-6


def test_a_hit_that_is_not_loaded_is_explained(caplog):
    with caplog.at_level(logging.INFO, "lmcache_async"):
        decider().decide("r7", Hit(costs_of((10, 1.5)), 1000, 0, 1001))

    assert "request r7: decided=recompute: 0 of the 1000 tokens of the hit are used" in caplog.text
    assert ": 1.001 s to the first token, 1.501 s with all 1000 tokens loaded" in caplog.text


@given(runs, st.floats(0, 120))
def test_costs_between_the_ends_of_runs_are_in_proportion(parts, chunks):
    costs = costs_of(*parts)

    found = seconds_up_to(costs, chunks)

    assert 0 <= found <= (costs[-1][1] if costs else 0.0)
    for end, seconds in costs:
        assert seconds_up_to(costs, end) == pytest.approx(seconds)


@given(st.lists(runs, min_size=1, max_size=3), st.integers(0, 100))
def test_the_slowest_rank_counts(ranks, chunks):
    ranks = [costs_of(*parts) for parts in ranks]

    merged = slowest(ranks, chunks)

    assert all(0 < end <= chunks for end, _ in merged)
    for end, seconds in merged:
        assert seconds == max(seconds_up_to(each, end) for each in ranks)
    assert unpack_costs(pack_costs(merged), chunks) == merged


@pytest.mark.parametrize(
    "packed",
    [
        None,
        "text",
        b"x",
        pack_costs(((1, 0.1), (1, 0.2))),
        pack_costs(((2, 0.1), (1, 0.2))),
        pack_costs(((1, 0.2), (2, 0.1))),
        pack_costs(((11, 0.1),)),
        pack_costs(((0, 0.1),)),
        pack_costs(((1, -0.1),)),
        pack_costs(((1, float("nan")),)),
        pack_costs(((1, float("inf")),)),
        pack_costs(tuple((number, 0.1) for number in range(1, 12))),
    ],
)
def test_invalid_costs_are_refused(packed):
    with pytest.raises(ValueError, match="as costs of 10 chunks"):
        unpack_costs(packed, 10)
