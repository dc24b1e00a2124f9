"""Runs tests/fuzz for a given time: all parsers, with noise and with damaged valid input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tools.torture.outcome import Outcome

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fuzz")
SPARE_S = 600.0
"""Time for hypothesis to shrink a failure, beyond the time of the test."""
LAST = 0.1
"""Minimum share of the time that another round needs."""


def run(*, seconds: float) -> Outcome:
    """Fuzz for `seconds`, shared evenly by the tests. Repeat while time is left, because some tests use less."""
    outcome = Outcome("fuzz")
    listed = subprocess.run(
        [*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = re.findall(r"^tests/fuzz/\S+::\S+", listed.stdout, re.MULTILINE)
    if not names:
        outcome.problem(f"there are no tests: {(listed.stdout + listed.stderr)[-1000:]}")
        return outcome.end()
    outcome.counts |= {"tests": len(names), "rounds": 0}
    begin = time.monotonic()
    while not outcome.failed and (left := seconds - (time.monotonic() - begin)) > LAST * seconds:
        fuzz(left / len(names), len(names), outcome)
        outcome.add("rounds")
        outcome.progress(time.monotonic() - begin, seconds, "seconds")
    return outcome.end()


def fuzz(each_s: float, tests: int, outcome: Outcome) -> None:
    """Run one round with `each_s` seconds per test."""
    ran = subprocess.run(
        [*PYTEST, "--timeout", f"{each_s + SPARE_S:.0f}"],
        cwd=ROOT,
        env=os.environ | {"LMCACHE_ASYNC_FUZZ_SECONDS": str(each_s)},
        capture_output=True,
        text=True,
        check=False,
    )
    outcome.expect(ran.returncode == 0, f"status {ran.returncode}: {(ran.stdout + ran.stderr)[-4000:]}")
    passed = re.search(r"(\d+) passed", ran.stdout)
    outcome.expect(passed is not None and int(passed[1]) == tests, f"{passed and passed[0]} of {tests} tests")
