"""Load decisions, sent from the scheduler to the status page."""

from __future__ import annotations

from lmcache_async.cli.top import StatusClient
from lmcache_async.integration.vllm.scheduler import MAX_PLANS
from tests.support.vllm_simulator import (
    Simulators,
    engine_of,
    prompt,
)
from tests.unit.vllm.test_scheduler import Bench, hit

STATUS_PAGE = {"http.listen": "127.0.0.1:0"}


def test_each_load_plan_is_sent_once_and_at_most_as_many_as_the_page_shows() -> None:
    bench = Bench(**STATUS_PAGE)
    request = bench.request(20)
    for _ in range(2):
        bench.allocate(request, 0, 20)
    assert [plan.request_id for plan in bench.idle().plans] == [request.request_id]

    for _ in range(MAX_PLANS + 50):
        bench.allocate(bench.request(1), 0, 1)
    assert len(bench.idle().plans) == MAX_PLANS
    assert bench.idle().plans == ()

    without_page = Bench()
    without_page.allocate(without_page.request(20), 0, 20)
    assert without_page.idle().plans == ()


def test_the_tokens_of_a_short_prompt_are_not_said_to_be_in_the_cache_of_vllm() -> None:
    bench = Bench(**STATUS_PAGE)
    bench.allocate(bench.request(2), 0, 2)
    cached = bench.request(3)
    bench.scheduler.match(cached, 2)
    bench.allocate(cached, 0, 1)

    assert [(plan.decided, plan.local_tokens) for plan in bench.idle().plans] == [("miss", 0), ("local", 2)]


def test_a_hit_is_not_said_to_be_loaded_if_another_connector_loads_the_prompt() -> None:
    bench = Bench(beside_others=True, **STATUS_PAGE)
    request = bench.request(20, answer=hit(2))
    assert bench.scheduler.match(request, 0) == (16, True)
    bench.allocate(request, 0, 20)

    assert [(plan.decided, plan.load_tokens) for plan in bench.idle().plans] == [("other", 0)]
    assert not any(bench.scheduler.metrics.values("decided_total").values())


def test_the_workers_of_a_real_scheduler_know_each_plan(simulators: Simulators) -> None:
    tokens = prompt(200)
    sim = simulators(STATUS_PAGE)
    sim.add("first", tokens, max_tokens=2)
    simulators.settle(sim)
    sim.add("second", tokens, max_tokens=2)
    sim.run()
    pages = [StatusClient(engine_of(rank).status_url) for rank in sim.ranks]
    simulators.until(lambda: all(len(page.read()["recent"]) == 2 for page in pages))

    status = pages[0].read()
    assert [each["plan"]["decided"] for each in status["recent"]] == ["load", "miss"]
    assert status["totals"]["loaded_bytes"] > 0
    for rank, page in zip(sim.ranks, pages, strict=True):
        second, first = page.read()["recent"]
        assert first["plan"]["decided"] == "miss"
        assert second["plan"]["decided"] == "load"
        assert second["plan"]["prompt_tokens"] == 200
        assert second["plan"]["load_tokens"] > 0
        assert second["loaded"]["tokens"] >= second["plan"]["load_tokens"]
        assert sum(engine_of(rank).metrics.decided.values()) == 2
