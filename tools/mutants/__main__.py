"""Mutation tests: remove one guarantee at a time from a copy of the source, and check that tests fail."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.mutants.mutation import Mutation, copy_tree, mutated
from tools.mutants.mutations import MUTATIONS
from tools.processes import run_logged

TIMEOUT_S = 1200.0
"""Timeout of a pytest run. A mutant that hangs is detected by the shorter timeout per test."""

TEST_TIMEOUT_S = 90
"""Timeout of one test of a mutant. Tests of the original source may take longer."""


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float = TEST_TIMEOUT_S) -> tuple[int, str]:
    """Return pytest's exit status and output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["--timeout", str(timeout_s), "-m", "not gpu and not vllm", *tests]
    # The copy precedes the checkout on the path. Fixed seeds give every run of a mutant the same tests.
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.NamedTemporaryFile(prefix="lmcache-async-mutant-", suffix=".log") as log:
        path = Path(log.name)
        status = run_logged(command, path, cwd=tree, environment=environment, timeout_s=TIMEOUT_S)
        output = path.read_text(encoding="utf-8", errors="replace")
    if status is None:
        return 1, f"FAILED tests/::no-end-within-{TIMEOUT_S:.0f}-s"
    return status, output


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def verdict(status: int, output: str) -> tuple[bool, str]:
    """Return whether the tests failed, and the first failed test."""
    if status == 0:
        return False, "SURVIVED"
    failures = re.findall(r"^(?:FAILED|ERROR) (tests/[^ ]+::[^ ]+)", output, re.MULTILINE)
    if status == 1 and failures:  # errors of collection have another status
        return True, failures[0]
    if "+++ Timeout +++" in output or "Timeout (>" in output:
        return True, "a test hangs"
    return False, f"NO TEST RAN: status {status}: {output.strip().splitlines()[-1:]}"


def check_origin(tree: Path) -> None:
    """Check that tests in the copy import the package of the copy."""
    code = "import lmcache_async.memory.record as r, lmcache_async.plugins.disk.files as d; print(r.__file__, d.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    if not all(Path(name).resolve().is_relative_to(tree) for name in found):
        raise SystemExit(f"tests in the copy {tree} import {found} instead of the copy")


def check(tree: Path, mutation: Mutation) -> bool:
    path = tree / mutation.path
    source = path.read_text(encoding="utf-8")
    begin = time.monotonic()
    path.write_text(mutated(mutation, source), encoding="utf-8")
    try:
        noticed, how = verdict(*run_tests(tree, mutation.tests))
    finally:
        path.write_text(source, encoding="utf-8")
    tell(f"{'ok  ' if noticed else 'FAIL'} {time.monotonic() - begin:5.0f} s  {mutation.name}: {how}")
    return noticed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only mutations with TEXT in their name or file; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="list the mutations without running them")
    options = parser.parse_args()
    texts = options.only or [""]
    chosen = [m for m in MUTATIONS if any(text in m.name or text in m.path for text in texts)]
    if options.list or not chosen:
        tell("\n".join(f"{m.path}: {m.name}" for m in chosen or MUTATIONS))
        return 0 if chosen else 2
    with tempfile.TemporaryDirectory(prefix="lmcache-async-mutants-") as name:
        tree = Path(name).resolve()
        copy_tree(tree)
        check_origin(tree)
        tell(f"{len(chosen)} mutations; first the tests without a mutation")
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        status, output = run_tests(tree, tests, TIMEOUT_S)
        if status:
            tell(output[-3000:])
            tell("the tests fail without any mutation, so no mutation can be judged")
            return 1
        survivors = [mutation.name for mutation in chosen if not check(tree, mutation)]
    tell(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutations were detected")
    for survivor in survivors:
        tell(f"  not detected: {survivor}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
