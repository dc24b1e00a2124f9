"""Families of metrics: as text that Prometheus reads, added up, subtracted, and on their way."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.observability.families import (
    Family,
    Filling,
    Sample,
    exposition,
    from_plain,
    labelled,
    merged,
    since,
    to_plain,
)

HITS = Family("x_hits_total", "counter", "Hits.", ("tier",))
HELD = Family("x_held_bytes", "gauge", "Held.", ("tier",))
STATE = Family("x_state", "gauge", "The worst.", merge="max")
TIME = Family("x_seconds", "histogram", "How long.", ("tier",), (), (0.1, 1.0))
TABLE = (HITS, HELD, STATE, TIME)


def filled(hits=1, held=2, state=0, counts=(0, 0, 0), seconds=0.0, tier="cpu"):
    out = Filling(TABLE)
    out.put(HITS.name, hits, tier)
    out.put(HELD.name, held, tier)
    out.put(STATE.name, state)
    out.put_counts(TIME.name, counts, seconds, tier)
    return out.families()


def parsed(families):
    """Values by name and labels, as Prometheus' own parser understands the text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition(families).decode())
        for sample in family.samples
    }


def test_a_prometheus_server_reads_what_was_filled_in():
    assert parsed(filled(hits=7, held=0.25, state=2, counts=(3, 2, 1), seconds=9.5)) == {
        ("x_hits_total", (("tier", "cpu"),)): 7,
        ("x_held_bytes", (("tier", "cpu"),)): 0.25,
        ("x_state", ()): 2,
        ("x_seconds_bucket", (("le", "0.1"), ("tier", "cpu"))): 3,
        ("x_seconds_bucket", (("le", "1"), ("tier", "cpu"))): 5,
        ("x_seconds_bucket", (("le", "+Inf"), ("tier", "cpu"))): 6,
        ("x_seconds_sum", (("tier", "cpu"),)): 9.5,
        ("x_seconds_count", (("tier", "cpu"),)): 6,
    }


@given(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    )
)
def test_any_text_is_a_label(text):
    out = Filling([Family("x_total", "counter", 'a "help"\nof \\ two lines', ("cause",))])
    out.put("x_total", 1, text)

    assert parsed(out.families()) == {("x_total", (("cause", text),)): 1}


@pytest.mark.parametrize("value", [0, 1e300, 1.5, -3, float("inf"), float("-inf"), 2**53, float("nan")])
def test_any_number_is_a_value(value):
    out = Filling([Family("x", "gauge", "Any.")])
    out.put("x", value)

    (got,) = parsed(out.families()).values()
    assert got == pytest.approx(value, rel=0, nan_ok=True)


def test_ranks_add_up_and_the_worst_state_is_the_state_of_all():
    ranks = [
        filled(hits=1, held=10, state=2, counts=(1, 0, 0), seconds=0.1),
        filled(hits=2, held=20, state=1, counts=(0, 0, 4), seconds=8.0),
        filled(hits=4, held=40, state=0, tier="disk"),
    ]

    together = parsed(merged(ranks))

    assert together["x_hits_total", (("tier", "cpu"),)] == 3
    assert together["x_hits_total", (("tier", "disk"),)] == 4
    assert together["x_held_bytes", (("tier", "cpu"),)] == 30
    assert together["x_state", ()] == 2
    assert together["x_seconds_count", (("tier", "cpu"),)] == 5
    assert together["x_seconds_sum", (("tier", "cpu"),)] == pytest.approx(8.1)


def test_families_that_differ_are_not_added_up():
    other = Family("x_hits_total", "counter", "Hits.", ("tenant",), (Sample(("a",), 1),))

    with pytest.raises(ValueError, match=r"x_hits_total is a counter of \('tier',\).*\('tenant',\)"):
        merged([filled(), [other]])


def test_a_value_with_other_labels_than_the_table_has_is_refused():
    with pytest.raises(ValueError, match=r"x_hits_total has the labels \('tier',\), not the values \(\)"):
        Filling(TABLE).put("x_hits_total", 1)


counts = st.tuples(*[st.integers(0, 5)] * 3)
steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), counts), min_size=1, max_size=6)


@given(steps)
def test_what_came_since_adds_up_to_what_there_is(steps):
    hits, seconds, buckets, parts, former = 0, 0, [0, 0, 0], [], []
    for more, held, observed in steps:
        hits += more
        seconds += sum(observed)
        buckets = [a + b for a, b in zip(buckets, observed, strict=True)]
        now = filled(hits, held, 0, buckets, seconds)
        parts.append([family for family in since(now, former) if family.kind != "gauge"])
        assert since(now, now) == []
        former = now

    assert parsed(merged(parts)) == parsed([family for family in former if family.kind != "gauge"])


def test_since_tells_gauges_as_they_are_and_only_where_they_moved():
    changed = since(filled(hits=5, held=7), filled(hits=5, held=3))

    assert parsed(changed) == {("x_held_bytes", (("tier", "cpu"),)): 7}


def test_families_travel_by_msgpack():
    families = filled(3, 1.5, 1, (1, 2, 3), 4.5)

    assert from_plain(msgpack.unpackb(msgpack.packb(to_plain(families)))) == families


def test_further_labels_come_in_front():
    assert (
        parsed(labelled(filled(hits=7), rank="3", engine="a"))[
            "x_hits_total", (("engine", "a"), ("rank", "3"), ("tier", "cpu"))
        ]
        == 7
    )
