"""Command-line options: which campaigns run, and how long."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """Length of the campaigns: a number each, or `seconds` for each.

    Attributes:
        seconds: Duration of each campaign; 0 to use the numbers.
        seed: Random seed of all campaigns.
        kills: Kills of storing engines.
        damages: Damaged records.
        operations: Operations of `churn`, which takes at most `churn_seconds`.
        simulated: Operations of the simulation.
        fuzz_seconds: Duration of the fuzzing, shared by its tests.
        questions: Requests to a vLLM with a faulty disk.
        requests: Requests of random traffic to vLLMs with small caches.
    """

    seed: int
    seconds: float = 0.0
    kills: int = 100
    damages: int = 1_000
    operations: int = 1_000_000
    churn_seconds: float = 60.0
    simulated: int = 20_000
    fuzz_seconds: float = 60.0
    questions: int = 24
    requests: int = 240


LONG = {
    "kills": 1_000,
    "damages": 10_000,
    "operations": 1_000_000,
    "churn_seconds": 3600.0,
    "simulated": 1_000_000,
    "fuzz_seconds": 1800.0,
    "questions": 200,
    "requests": 6_000,
}
"""Lengths before a release: more than an hour on two cores."""


def parse(names: list[str]) -> tuple[list[str], Options, Path]:
    """Return the campaigns to run, their options, and the path of the results."""
    parser = argparse.ArgumentParser(prog="make torture", description="Run torture campaigns.")
    parser.add_argument(
        "campaigns", nargs="*", metavar="campaign", help=f"one of {', '.join(names)}; all by default"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="total duration, shared evenly by the campaigns"
    )
    parser.add_argument("--long", action="store_true", help="lengths before a release: hours")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", type=Path, default=Path("build/torture.json"), help="file for the results")
    for name, value in LONG.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None)
    given = parser.parse_args()
    unknown = set(given.campaigns) - set(names)
    if unknown:
        parser.error(f"there is no campaign {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    chosen = [name for name in names if not given.campaigns or name in given.campaigns]
    lengths = {name: getattr(given, name) for name in LONG if getattr(given, name) is not None}
    seconds = given.minutes * 60 / len(chosen)
    options = Options(seed=given.seed, seconds=seconds, **((LONG if given.long else {}) | lengths))
    return chosen, options, given.json
