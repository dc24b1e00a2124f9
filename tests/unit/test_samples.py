"""Values of metric series: differences, sums, messages and Prometheus' text."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.metrics.samples import Samples, exposition
from lmcache_async.metrics.series import REQUEST_BUCKETS_S, SERIES

BUCKETS = len(REQUEST_BUCKETS_S) + 1


def filled(hits=1, held=2, counts=(0, 0, 0), seconds=0.0, tier="cpu"):
    samples = Samples()
    samples.add("tier_hit_chunks_total", hits, tier)
    samples.add("tier_bytes", held, tier)
    samples.add("store_seconds", (seconds, *counts, *[0] * (BUCKETS - 3)))
    return samples


def parsed(samples):
    """Values by name and labels, as read by Prometheus' own parser."""
    return {
        (sample.name.removeprefix("lmcache_async_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition(samples.families()).decode())
        for sample in family.samples
    }


def test_prometheus_reads_counters_gauges_and_cumulative_buckets():
    text = parsed(filled(hits=7, held=0.25, counts=(3, 2, 1), seconds=9.5))

    assert text["tier_hit_chunks_total", (("tier", "cpu"),)] == 7
    assert text["tier_bytes", (("tier", "cpu"),)] == 0.25
    assert text["store_seconds_bucket", (("le", "0.0005"),)] == 3
    assert text["store_seconds_bucket", (("le", "0.001"),)] == 5
    assert text["store_seconds_bucket", (("le", "60.0"),)] == 6
    assert text["store_seconds_bucket", (("le", "+Inf"),)] == 6
    assert text["store_seconds_sum", ()] == 9.5
    assert text["store_seconds_count", ()] == 6
    assert len(text) == 2 + BUCKETS + 2


@given(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    )
)
def test_any_text_is_a_label(text):
    samples = Samples()
    samples.add("dropped_chunks_total", 1, text)

    assert parsed(samples) == {("dropped_chunks_total", (("cause", text),)): 1}


@pytest.mark.parametrize("value", [0, 1e300, 1.5, -3, float("inf"), float("-inf"), 2**53, float("nan")])
def test_any_number_is_a_value(value):
    samples = Samples()
    samples.add("running", value)

    (got,) = parsed(samples).values()
    assert got == pytest.approx(value, rel=0, nan_ok=True)


def test_values_with_the_same_labels_add_up_and_the_worst_state_wins():
    samples = Samples()
    for state, used in ((1, 10), (2, 20), (0, 30)):
        samples.add("breaker_state", state, "disk", "read")
        samples.add("limit_used", used, "disk", "calls")
        samples.add("store_seconds", (0.5, *[1] * BUCKETS))

    assert samples.get("breaker_state", "disk", "read") == 2
    assert samples.get("limit_used", "disk", "calls") == samples.total("limit_used") == 60
    assert samples.get("store_seconds") == (1.5, *[3] * BUCKETS)


def test_other_labels_than_the_series_has_are_refused():
    with pytest.raises(ValueError, match=r"tier_bytes has the labels \('tier',\), but the values \(\)"):
        Samples().add("tier_bytes", 1)


counts = st.tuples(*[st.integers(0, 5)] * 3)
steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), counts), min_size=1, max_size=6)


@given(steps)
def test_the_differences_add_up_to_the_values(steps):
    hits, seconds, buckets, former, together = 0, 0, [0, 0, 0], Samples(), Samples()
    for more, held, observed in steps:
        hits += more
        seconds += sum(observed)
        buckets = [a + b for a, b in zip(buckets, observed, strict=True)]
        now = filled(hits, held, buckets, seconds)
        together.update(now.since(former))
        assert not now.since(now)
        former = now

    assert parsed(together) == parsed(former)


def test_a_difference_has_gauges_as_they_are_and_only_changed_values():
    changed = filled(hits=5, held=7).since(filled(hits=5, held=3))

    assert parsed(changed) == {("tier_bytes", (("tier", "cpu"),)): 7}


def test_samples_are_the_same_after_msgpack():
    samples = filled(3, 1.5, (1, 2, 3), 4.5)

    received = Samples.from_plain(msgpack.unpackb(msgpack.packb(samples.to_plain())))

    assert list(received) == list(samples)


def test_series_of_another_version_are_ignored():
    assert not Samples.from_plain({"of_tomorrow_total": [[[], 1]]})


def test_every_series_has_its_own_name_and_a_base_unit():
    names = [series.full_name for series in SERIES.values()]

    assert len(set(names)) == len(names)
    for series in SERIES.values():
        assert series.name.endswith("_total") == (series.kind == "counter")
        assert not series.name.endswith(("_ms", "_mb", "_gb", "_percent"))
        assert bool(series.buckets) == (series.kind == "histogram")
        assert series.help.endswith(".")
