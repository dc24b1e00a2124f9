"""The whole engine in virtual time under faults: seed after seed of the deterministic simulation."""

from __future__ import annotations

import time

from lmcache_async.registry import Registry
from tests.simulation.faults import Faults
from tests.simulation.world import simulate
from tools.torture.outcome import Outcome

STEPS = 1_000
"""Operations of one seed: few enough to be replayed in seconds."""


def run(*, operations: int, seconds: float, seed: int) -> Outcome:
    """Make so many operations, or for so long if `seconds` is not 0; every third seed has many faults."""
    outcome = Outcome("simulate", {"operations": 0, "seeds": 0, "seed": seed})
    registry = Registry()
    deadline = time.monotonic() + seconds
    while not outcome.hopeless:
        done = outcome.counts["operations"]
        if time.monotonic() > deadline if seconds else done >= operations:
            break
        number = outcome.counts["seeds"]
        faults = Faults.MANY if number % 3 == 2 else Faults.SOME
        report = simulate(seed + number, steps=STEPS, faults=faults, installed=registry)
        outcome.add("operations", report.made)
        outcome.add("seeds")
        outcome.add("virtual hours", report.virtual_s / 3600)
        for name, count in report.counts.items():
            outcome.add(name, count)
        outcome.expect(not report.violation, f"{report.violation}; replay: {report.command}")
        if seconds:
            outcome.tell(seconds - (deadline - time.monotonic()), seconds, "seconds")
        else:
            outcome.tell(outcome.counts["operations"], operations, "operations")
    outcome.counts["virtual hours"] = round(outcome.counts.get("virtual hours", 0), 1)
    return outcome.end()
