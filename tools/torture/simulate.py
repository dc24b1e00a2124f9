"""Runs the deterministic simulation of the engine with one seed after the other."""

from __future__ import annotations

from tests.simulation.faults import Faults
from tests.simulation.world import simulate
from tools.torture.outcome import Outcome

STEPS = 1_000
"""Operations per seed: a failure is replayed in seconds."""


def run(*, operations: int, seconds: float, seed: int) -> Outcome:
    """Simulate `operations`, or for `seconds` if not 0. Every third seed has many faults."""
    outcome = Outcome("simulate", {"operations": 0, "seeds": 0, "seed": seed})
    while outcome.left("operations", operations, seconds):
        number = outcome.counts["seeds"]
        faults = Faults.MANY if number % 3 == 2 else Faults.SOME
        report = simulate(seed + number, steps=STEPS, faults=faults)
        outcome.add("operations", report.made)
        outcome.add("seeds")
        outcome.add("virtual hours", report.virtual_s / 3600)
        for name, count in report.counts.items():
            outcome.add(name, count)
        outcome.expect(not report.violation, f"{report.violation}; replay: {report.command}")
    outcome.counts["virtual hours"] = round(outcome.counts.get("virtual hours", 0), 1)
    return outcome.end()
