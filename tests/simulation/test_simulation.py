"""Simulations of the engine: a fixed number of seeds, and exact replay.

`make simulate ARGS="--seeds 1000 --steps 10000 --faults many"` runs more.
"""

import functools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.faults import Faults
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import simulate

ROOT = Path(__file__).parents[2]
REPLAY = """
import json
from tests.simulation.faults import Faults
from tests.simulation.world import simulate
report = simulate(11, steps=150, faults=Faults.MANY)
print(json.dumps([report.digest, report.decisions, report.made, report.virtual_s, dict(report.counts)]))
"""


SEEDS = range(5)


@pytest.fixture(scope="module")
def simulated(installed):
    """Simulate a seed with a level of faults, once for all tests of this module."""
    return functools.cache(lambda seed, faults: simulate(seed, steps=300, faults=faults, installed=installed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("faults", Faults)
def test_nothing_happens_that_must_not_happen(seed, faults, simulated):
    report = simulated(seed, faults)

    assert not report.violation, f"{report.violation}\n{report.command}"
    assert report.made >= 300


def test_the_worlds_are_full_of_events(simulated):
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


def kind(seed):
    rng = random.Random(f"{seed} {Faults.SOME}")
    scenario = draw_scenario(rng, Faults.SOME, Path("/nowhere"))
    return scenario.has_files, scenario.encrypted


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("real_disk", [False, True])
def test_a_seed_is_replayed_to_the_letter(installed, real_disk, encrypted):
    seed = next(seed for seed in range(100) if kind(seed) == (real_disk, encrypted))

    first, again = (simulate(seed, steps=200, faults=Faults.SOME, installed=installed) for _ in range(2))

    assert (first.digest, first.decisions) == (again.digest, again.decisions)
    assert first.counts == again.counts


def test_every_seed_simulates_something_else(simulated):
    assert len({simulated(seed, Faults.SOME).digest for seed in SEEDS}) == len(SEEDS)


def test_a_seed_is_replayed_to_the_letter_in_another_process(installed):
    """A replay does not depend on hash seeds or on addresses of objects."""
    here = simulate(11, steps=150, faults=Faults.MANY, installed=installed)
    ran = subprocess.run(
        [sys.executable, "-c", REPLAY],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    assert json.loads(ran.stdout) == [here.digest, here.decisions, here.made, here.virtual_s, here.counts]


def test_a_violation_is_told_with_seed_step_and_the_command_that_repeats_it(installed, monkeypatch):
    monkeypatch.setattr("lmcache_async.pipeline.batch.Scope.close", lambda self: None)

    first, again = (simulate(5, steps=200, faults=Faults.SOME, installed=installed) for _ in range(2))

    assert "nothing is under way, but slabs leased" in first.violation
    assert first.command == "python -m tools.simulate --seed 5 --steps 200 --faults some"
    assert first.last_steps[-1].startswith(f"{first.made} ")
    assert first.last_decisions
    assert (first.violation, first.made, first.digest) == (again.violation, again.made, again.digest)
