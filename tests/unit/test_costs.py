"""Measured speeds of an engine's tiers."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.engine.costs import STALE_S, CostLine, LoadCosts
from lmcache_async.errors import TierUnavailableError
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import turns
from lmcache_async.types import RetrieveReport
from tests.support.engines import chunks_of, store
from tests.support.tiers import Made

TOKENS = list(range(100, 140))  # 5 chunks of 8


def report(seconds, **by_tier):
    return RetrieveReport(by_tier=by_tier, seconds=seconds)


@pytest.fixture
async def engine():
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await store(rig, engine, TOKENS)
        engine.made = made
        yield engine


def costs_of(engine):
    return LoadCosts(engine._parts.stack, engine._parts.arena, 8)


async def test_a_load_teaches_the_one_slow_tier_that_took_part(engine):
    costs = costs_of(engine)
    assert costs.cumulative([0, 0, 1]) == ((2, 0.0), (3, 0.0))

    costs.note(report(0.2, cpu=16))
    costs.note(report(3.0, cpu=8, dict=24))
    costs.note(report(99.0))
    costs.note(report(99.0, cpu=8))  # it waited for another tier, which had no hit

    assert costs.cumulative([0, 0, 1, 1, 1]) == ((2, 0.0), (5, pytest.approx(3.0)))
    assert costs.cumulative([]) == ()


async def test_loads_of_the_engine_are_measured_and_reported_by_lookups(engine):
    keys = [chunk.key for chunk in chunks_of(engine, TOKENS)]
    assert (await engine.lookup_keys(keys)).costs == ((5, 0.0),)

    await engine._parts.stack.tiers[0].tier.clear()
    await engine.retrieve(TOKENS, range(40))
    await engine._parts.stack.tiers[0].tier.clear()

    ((chunks, seconds),) = (await engine.lookup_keys(keys)).costs
    assert chunks == 5
    assert seconds > 0


async def test_a_tier_without_loads_is_measured_during_a_lookup(engine, monkeypatch):
    loop, costs = asyncio.get_running_loop(), engine._lookups.costs
    keys = [chunk.key for chunk in chunks_of(engine, TOKENS)]
    await engine._parts.stack.tiers[0].tier.clear()
    costs.note(report(1000.0, dict=8))
    now = loop.time()

    await engine.lookup_keys(keys)
    assert not engine._background  # measured just now
    monkeypatch.setattr(costs, "_measured_at", dict.fromkeys(costs._measured_at, now - STALE_S - 1))
    first = (await engine.lookup_keys(keys)).costs
    assert len(engine._background) == 1
    await engine.lookup_keys(keys)
    assert len(engine._background) == 1  # one at a time
    await asyncio.wait(engine._background)

    assert (await engine.lookup_keys(keys)).costs[-1][1] < first[-1][1]
    assert not engine._parts.arena.statistics().leased_slabs


async def test_a_measurement_that_fails_or_finds_nothing_changes_no_cost(engine, monkeypatch):
    costs = engine._lookups.costs
    leased = engine._parts.arena.statistics().leased_slabs

    async def fails(key, allocate):
        raise TierUnavailableError("gone")

    await costs.measure(b"\0" * 16, 1)
    monkeypatch.setattr(engine._parts.stack.tiers[1].tier, "get", fails)
    await costs.measure(b"\0" * 16, 1)

    assert costs.cumulative([1]) == ((1, 0.0),)
    assert engine._parts.arena.statistics().leased_slabs == leased


async def test_a_measurement_ends_with_the_engine():
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry, shutdown_timeout_s=0.01) as engine:
        stuck = asyncio.Event()

        async def hangs(key, allocate):
            await stuck.wait()

        engine._parts.stack.tiers[1].tier.get = hangs
        engine._spawn(engine._lookups.costs.measure(b"\0" * 16, 1))
        (task,) = engine._background
        await turns(2)

    assert task.cancelled()
    engine._spawn(engine._lookups.costs.measure(b"\0" * 16, 1))  # nothing is started after the close
    assert not engine._background


counts = st.integers(1, 100_000)
seconds = st.floats(1e-6, 1e3)


def line_of(*observations, **options):
    line = CostLine(**options)
    for count, took in observations:
        line.note(count, took)
    return line


def test_no_speed_is_known_at_first():
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
def test_more_chunks_never_take_less_time_and_times_are_finite(observations, one, other):
    line = line_of(*observations)

    low, high = sorted((line.seconds(one), line.seconds(other)))
    assert 0 <= low <= high < math.inf
    assert (line.seconds(min(one, other)), line.seconds(max(one, other))) == (low, high)


def test_old_measurements_are_forgotten():
    line = line_of(*[(10, 10.0)] * 50, *[(10, 0.1)] * 12)

    assert line.seconds(10) == pytest.approx(0.1, rel=2.0)
    assert line_of((10, 1.0), (10, 3.0), memory=1.0).seconds(10) == pytest.approx(2.0)
