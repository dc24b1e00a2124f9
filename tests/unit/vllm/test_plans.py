"""What vLLM's scheduler half tells the workers of each request, for who looks at them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_async.integration.vllm.decide import Hit, LoadDecider, PrefillClock
from lmcache_async.integration.vllm.lookups import Answer, Lookup
from lmcache_async.integration.vllm.plans import MAX_PLANS, Plans
from tests.unit.vllm.test_simulated import Simulators, engine_of, prompt, simulators

__all__ = ["simulators"]


def state(**given: Any) -> Any:
    request = SimpleNamespace(request_id="r", num_tokens=1001, skip_reading_prefix_cache=False)
    base = {"request": request, "told": False, "may_load": True, "local_tokens": 0, "lookup": None}
    return SimpleNamespace(**{**base, **given})


def lookup(**given: Any) -> Lookup:
    return Lookup(lookup_id="l", num_tokens=1001, epoch=0, asked_at=0.0, preemptions=0, **given)


def decided(one: Any, load_tokens: int = 0) -> tuple[str, str]:
    plans = Plans(block_size=16, chunk_size=100, wanted=True)
    plans.note(one, load_tokens)
    (plan,) = plans.take()
    return plan.decided, plan.why


def test_each_way_that_a_request_can_go_is_told() -> None:
    off = SimpleNamespace(request_id="r", num_tokens=1001, skip_reading_prefix_cache=True)
    decider = LoadDecider(PrefillClock(lambda: 0.0, 1000.0), 100)
    verdict = decider.verdict("r", Hit(((5, 9.0),), 500, 0, 1001))

    assert decided(state(may_load=False))[0] == "off"
    assert decided(state(request=off))[0] == "off"
    assert decided(state(local_tokens=992))[0] == "local"
    assert decided(state(lookup=lookup()))[0] == "late"
    assert decided(state(lookup=lookup(answer=Answer())))[0] == "miss"
    assert decided(state(lookup=lookup(answer=Answer(chunks=5), verdict=verdict))) == (
        "recompute",
        "1.001 s to the first token, 9.501 s with all 500 tokens loaded",
    )


@pytest.mark.parametrize(
    ("options", "costs", "promised", "told"),
    [
        ({"always": True}, 9.0, False, ("load", "vllm.load_policy is always")),
        ({}, 9.0, True, ("load", "another vLLM has computed it for this one")),
        ({"tokens_per_s": None}, 9.0, False, ("load", "how fast the model computes is not known yet")),
        ({}, 0.1, False, ("load", "0.601 s to the first token, 1.001 s without loading")),
    ],
)
def test_why_a_hit_is_loaded(
    options: dict[str, Any], costs: float, promised: bool, told: tuple[str, str]
) -> None:
    speed = options.pop("tokens_per_s", 1000.0)
    decider = LoadDecider(PrefillClock(lambda: 0.0, speed), 100, **options)
    verdict = decider.verdict("r", Hit(((5, costs),), 500, 0, 1001), promised=promised)

    assert (verdict.decided, verdict.why) == told


@pytest.mark.parametrize(
    ("tokens", "local", "told"),
    [
        (0, 0, ("miss", "no tier has a prefix of it")),
        (0, 500, ("miss", "no tier has a prefix of it")),
        (400, 500, ("local", "vLLM's own prefix cache has as much of it as the tiers")),
    ],
)
def test_why_nothing_is_loaded(tokens: int, local: int, told: tuple[str, str]) -> None:
    decider = LoadDecider(PrefillClock(lambda: 0.0, 1000.0), 100)

    verdict = decider.verdict("r", Hit((), tokens, local, 1001))

    assert (verdict.decided, verdict.why) == told


def test_a_request_is_told_once_and_no_more_than_a_page_shows() -> None:
    plans = Plans(block_size=16, chunk_size=100, wanted=True)
    one = state()
    plans.note(one, 0)
    plans.note(one, 0)
    assert len(plans.take()) == 1
    for _ in range(MAX_PLANS + 50):
        plans.note(state(), 0)
    assert len(plans.take()) == MAX_PLANS
    assert plans.take() == ()


def test_where_nobody_looks_nothing_is_told() -> None:
    plans = Plans(block_size=16, chunk_size=100, wanted=False)
    plans.note(state(), 0)

    assert plans.take() == ()


def test_the_workers_of_a_real_scheduler_know_each_plan(simulators: Simulators) -> None:
    tokens = prompt(200)
    sim = simulators({"http.listen": "127.0.0.1:0"})
    sim.add("first", tokens, max_tokens=2)
    simulators.settle(sim)
    sim.add("second", tokens, max_tokens=2)
    sim.run()
    recent = [engine_of(rank)._recent for rank in sim.ranks]
    simulators.until(lambda: all(len(one.as_list()) == 2 for one in recent))

    for one in recent:
        second, first = one.as_list()
        assert first["plan"]["decided"] == "miss"
        assert second["plan"]["decided"] == "load"
        assert second["plan"]["prompt_tokens"] == 200
        assert second["plan"]["load_tokens"] > 0
        assert second["loaded"]["tokens"] >= second["plan"]["load_tokens"]
        assert sum(one.decided.values()) == 2
