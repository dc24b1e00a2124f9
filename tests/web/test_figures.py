"""Charts and the list of recent requests, without I/O."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.metrics.charts import Sample, gauge_values, rates, shares
from lmcache_async.metrics.requests import MAX_NAME, RecentRequests
from lmcache_async.types import RequestPlan, RetrieveReport, StoreReport


def samples(*counts: dict[str, float]) -> list[Sample]:
    return [Sample(float(second), one) for second, one in enumerate(counts)]


def test_a_rate_is_the_growth_of_a_counter_per_second() -> None:
    two_seconds = [Sample(0.0, {"bytes": 10}), Sample(2.0, {"bytes": 30}), Sample(3.0, {"bytes": 30})]

    assert rates(two_seconds, "bytes") == [10.0, 0.0]
    assert rates(two_seconds, "unknown") == [0.0, 0.0]
    assert gauge_values([Sample(0, {"g": 1}), Sample(1, {"g": 2}), Sample(2, {})], "g") == [2, 0.0]


def test_a_share_covers_the_window_and_is_none_without_growth() -> None:
    told = samples(
        {"all": 0, "cpu": 0},
        {"all": 100, "cpu": 50},
        {"all": 100, "cpu": 50},
        {"all": 100, "cpu": 50},
        {"all": 200, "cpu": 150},
    )

    assert shares(told, ["cpu"], "all", window=2) == {"cpu": [0.5, 0.5, None, 1.0]}


def test_shares_of_late_loads_add_up_to_at_most_one() -> None:
    told = samples({"all": 100, "cpu": 0, "disk": 0}, {"all": 100, "cpu": 30, "disk": 10})

    assert shares(told, ["cpu", "disk"], "all", window=5) == {"cpu": [0.75], "disk": [0.25]}


steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=30)


@given(grown=steps, window=st.integers(1, 12))
def test_the_sum_of_shares_is_at_most_one(grown: list[tuple[int, int, int]], window: int) -> None:
    sums = [tuple(sum(column) for column in zip(*grown[: end + 1], strict=True)) for end in range(len(grown))]
    told = samples(*({"all": a, "cpu": b, "disk": c} for a, b, c in sums))
    found = shares(told, ["cpu", "disk"], "all", window=window)

    for at_once in zip(found["cpu"], found["disk"], strict=True):
        known = [value for value in at_once if value is not None]
        assert len(known) in {0, 2}
        assert all(0 <= value <= 1 for value in known)
        assert sum(known) <= 1 + 1e-9


def plan(name: str, **figures: object) -> RequestPlan:
    return RequestPlan(request_id=name, **figures)  # type: ignore[arg-type]


def test_a_request_is_one_entry_from_its_plan_to_its_last_store() -> None:
    recent = RecentRequests(clock=lambda: 1000.0)
    recent.planned(
        plan("r", prompt_tokens=700, local_tokens=100, load_tokens=500, decided="load", why="sooner")
    )
    report = RetrieveReport(
        hit_tokens=500, asked_tokens=500, bytes=9, seconds=0.5, by_tier=Counter(cpu=300, disk=200)
    )
    recent.retrieved("r", report)
    recent.stored("r", StoreReport(stored=1, tokens=100, bytes=5))
    recent.stored("r", StoreReport(stored=1, tokens=50, bytes=2, dropped=Counter(deadline=3)))

    (told,) = recent.as_list()
    assert told["plan"]["why"] == "sooner"
    assert told["loaded"]["by_tier"] == [["cpu", 300], ["disk", 200]]
    assert (told["stored"]["tokens"], told["stored"]["bytes"]) == (150, 7)
    assert told["stored"]["dropped"] == {"deadline": 3}


def test_requests_without_an_id_are_separate_entries() -> None:
    recent = RecentRequests()
    recent.retrieved("", RetrieveReport(asked_tokens=40))
    recent.retrieved("", RetrieveReport(asked_tokens=2))

    assert [entry["loaded"]["asked_tokens"] for entry in recent.as_list()] == [2, 40]


def test_the_list_and_its_names_are_bounded() -> None:
    recent = RecentRequests(most=3)
    for number in range(10):
        recent.planned(plan(f"{number}" + "x" * 5000, prompt_tokens=1))

    assert [told["request"][0] for told in recent.as_list()] == ["9", "8", "7"]
    assert all(len(told["request"]) == MAX_NAME for told in recent.as_list())
