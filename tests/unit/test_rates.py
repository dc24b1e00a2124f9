"""The line that is learnt from how long things took."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.engine.costs import CostLine

counts = st.integers(1, 100_000)
seconds = st.floats(1e-6, 1e3)


def line_of(*observations, **options):
    line = CostLine(**options)
    for count, took in observations:
        line.note(count, took)
    return line


def test_nothing_is_known_at_first():
    line = CostLine()

    assert (line.known, line.line, line.seconds(5)) == (False, (0.0, 0.0), 0.0)


@given(st.floats(0.001, 10), st.floats(1e-5, 1), st.lists(counts, min_size=2, max_size=8, unique=True))
def test_latency_and_rate_are_found_from_observations_on_a_line(latency, each, sizes):
    if max(sizes) < 2 * min(sizes):
        sizes = [*sizes, 3 * max(sizes)]
    line = line_of(*((size, latency + each * size) for size in sizes))

    for size in sizes:
        assert line.seconds(size) == pytest.approx(latency + each * size, rel=1e-3)


@given(counts, seconds)
def test_one_observation_is_a_rate(count, took):
    line = line_of((count, took))

    assert line.line[0] == 0.0
    assert line.seconds(2 * count) == pytest.approx(2 * took)
    assert line.seconds(0) == 0.0


@given(st.lists(st.tuples(counts, seconds), min_size=1, max_size=20), counts, counts)
def test_more_never_takes_less_and_nothing_is_negative_or_endless(observations, one, other):
    line = line_of(*observations)

    low, high = sorted((line.seconds(one), line.seconds(other)))
    assert 0 <= low <= high < math.inf
    assert (line.seconds(min(one, other)), line.seconds(max(one, other))) == (low, high)


def test_what_was_long_ago_is_forgotten():
    line = line_of(*[(10, 10.0)] * 50, *[(10, 0.1)] * 12)

    assert line.seconds(10) == pytest.approx(0.1, rel=2.0)
    assert line_of((10, 1.0), (10, 3.0), memory=1.0).seconds(10) == pytest.approx(2.0)
