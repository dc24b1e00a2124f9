"""Everything that parses, fed with noise and with damaged truth: tests/fuzz, for as long as asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tools.torture.outcome import Outcome

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fuzz")
SPARE_S = 600.0
"""What a test may take beyond its time, for the shrinking of what it found."""


def run(*, seconds: float) -> Outcome:
    """Fuzz for so long, shared evenly by the tests."""
    outcome = Outcome("fuzz")
    listed = subprocess.run(
        [*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = re.findall(r"^tests/fuzz/\S+::\S+", listed.stdout, re.MULTILINE)
    if not names:
        outcome.problem(f"there are no tests: {(listed.stdout + listed.stderr)[-1000:]}")
        return outcome.end()
    each = seconds / len(names)
    outcome.counts |= {"tests": len(names), "seconds each": round(each, 1)}
    command = [*PYTEST, "--timeout", f"{each + SPARE_S:.0f}"]
    environment = os.environ | {"LMCACHE_ASYNC_FUZZ_SECONDS": str(each)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    outcome.expect(process.returncode == 0, f"status {process.returncode}: {output[-4000:]}")
    passed = re.search(r"(\d+) passed", output)
    outcome.counts["tests passed"] = int(passed[1]) if passed else 0
    outcome.expect(
        outcome.counts["tests passed"] == len(names), f"{passed and passed[0]} of {len(names)} tests"
    )
    return outcome.end()
