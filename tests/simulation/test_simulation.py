"""Simulations of the engine: a fixed number of seeds, and exact replay.

`make simulate ARGS="--seeds 1000 --steps 10000 --faults many"` runs more.
"""

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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("faults", Faults)
def test_nothing_happens_that_must_not_happen(seed, faults, installed):
    report = simulate(seed, steps=300, faults=faults, installed=installed)

    assert not report.violation, f"{report.violation}\n{report.command}"
    assert report.made >= 300


def test_the_worlds_are_full_of_events(installed):
    reports = [simulate(seed, steps=200, faults=Faults.MANY, installed=installed) for seed in range(20, 28)]

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
    seed, another = [seed for seed in range(100) if kind(seed) == (real_disk, encrypted)][:2]

    first, again, other = (
        simulate(seed, steps=200, faults=Faults.SOME, installed=installed) for seed in (seed, seed, another)
    )

    assert (first.digest, first.decisions) == (again.digest, again.decisions)
    assert first.counts == again.counts
    assert first.digest != other.digest


def test_a_seed_is_replayed_to_the_letter_in_other_processes():
    """A replay does not depend on hash seeds or on addresses of objects."""
    answers = []
    for hash_seed in ("0", "random"):
        ran = subprocess.run(
            [sys.executable, "-c", REPLAY],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        answers.append(json.loads(ran.stdout))

    assert answers[0] == answers[1]


def test_a_violation_is_told_with_seed_step_and_the_command_that_repeats_it(installed, monkeypatch):
    monkeypatch.setattr("lmcache_async.pipeline.batch.Scope.close", lambda self: None)

    first, again = (simulate(5, steps=200, faults=Faults.SOME, installed=installed) for _ in range(2))

    assert "nothing is under way, but slabs leased" in first.violation
    assert first.command == "python -m tools.simulate --seed 5 --steps 200 --faults some"
    assert first.last_steps[-1].startswith(f"{first.made} ")
    assert first.last_decisions
    assert (first.violation, first.made, first.digest) == (again.violation, again.made, again.digest)
