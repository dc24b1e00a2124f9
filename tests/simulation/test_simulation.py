"""Simulations of the engine: a fixed number of seeds, and exact replay.

`make simulate ARGS="--seeds 1000 --steps 10000 --faults many"` runs more.
"""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_async.tiers.writer import WriterStatistics
from tests.simulation.faults import Faults
from tests.simulation.loop import Violation
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import check_always, simulate

ROOT = Path(__file__).parents[2]
REPLAY = """
import json
from tests.simulation.test_simulation import REPLAYED, STEPS, facts
from tests.simulation.world import simulate
print(json.dumps([facts(simulate(seed, steps=STEPS, faults=faults)) for seed, faults in REPLAYED]))
"""


SEEDS = range(5)
STEPS = 200
REPLAYED = [(0, Faults.SOME), (2, Faults.SOME), (0, Faults.MANY), (3, Faults.MANY)]
"""Seeds with and without the real disk tier, with and without encryption."""


@pytest.fixture(scope="module")
def simulated():
    """Simulate a seed with a level of faults, once for all tests of this module."""
    return functools.cache(lambda seed, faults: simulate(seed, steps=STEPS, faults=faults))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("faults", Faults)
def test_simulations_have_no_violation(seed, faults, simulated):
    report = simulated(seed, faults)

    assert not report.violation, f"{report.violation}\n{report.command}"
    assert report.made >= STEPS


def test_simulations_contain_many_events(simulated):
    reports = [simulated(seed, Faults.MANY) for seed in SEEDS]

    total = sum((Counter(report.counts) for report in reports), Counter())
    for event in (
        "store",
        "retrieve",
        "lookup",
        "prefetch",
        "clear",
        "flush",
        "cancelled",
        "crash",
        "hit tokens",
    ):
        assert total[event] > 0, event


def test_every_seed_simulates_something_else(simulated):
    assert len({simulated(seed, Faults.SOME).digest for seed in SEEDS}) == len(SEEDS)


def facts(report):
    return [report.digest, report.decisions, report.made, report.virtual_s, dict(report.counts)]


def test_replayed_seeds_are_of_every_kind():
    kinds = set()
    for seed, faults in REPLAYED:
        scenario = draw_scenario(random.Random(f"{seed} {faults}"), faults, Path("/nowhere"))
        kinds.add((scenario.has_files, scenario.encrypted))

    assert len(kinds) == 4


def test_a_seed_is_replayed_to_the_letter_in_another_process(simulated):
    """A replay does not depend on what ran before, on hash seeds or on addresses of objects."""
    ran = subprocess.run(
        [sys.executable, "-c", REPLAY],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    assert json.loads(ran.stdout) == [facts(simulated(seed, faults)) for seed, faults in REPLAYED]


def test_a_violation_is_reported_with_seed_step_and_replay_command(monkeypatch):
    monkeypatch.setattr("lmcache_async.pipeline.batch.Scope.close", lambda self: None)

    first, again = (simulate(5, steps=200, faults=Faults.SOME) for _ in range(2))

    assert "nothing is under way, but slabs leased" in first.violation
    assert first.command == "python -m tools.simulate --seed 5 --steps 200 --faults some"
    assert first.last_steps[-1].startswith(f"{first.made} ")
    assert first.last_decisions
    assert (first.violation, first.made, first.digest) == (again.violation, again.made, again.digest)


@pytest.mark.parametrize(("queued", "is_violation"), [(100, False), (101, True)])
def test_a_queue_may_exceed_a_bound_that_was_lowered_but_not_the_configured_one(queued, is_violation):
    """Seed 8 with 2 000 steps and many faults: a tier became slow while its queue was full."""
    writer = WriterStatistics(queued_chunks=2, queued_bytes=queued, max_bytes=40, refused=0)
    statistics = SimpleNamespace(writers={"remote": writer}, tiers={}, arena=SimpleNamespace(slab_bytes=50))
    config = SimpleNamespace(max_pending_write_bytes=100)
    engine: Any = SimpleNamespace(config=config, statistics=lambda: statistics)

    with pytest.raises(Violation) if is_violation else contextlib.nullcontext():
        check_always(engine)
