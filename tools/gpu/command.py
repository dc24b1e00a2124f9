"""The parts of `python -m tools.gpu`, and the processes that run them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tools.gpu.checkout import ROOT, environment, facts
from tools.processes import run_logged

SPARE_S = 20.0
"""A part stops measuring this long before its time limit, to write its results."""

INTERPRETED_TESTS = ("tests/unit/test_copier_kernels.py", "tests/unit/test_copier_cuda.py")
"""Tests of the GPU code that need no GPU; with `--device cpu` they replace the GPU tests."""

MARKER = re.compile(r"^(@|pytestmark = .*)pytest\.mark\.gpu\b", re.MULTILINE)

QUICK_TOKENS = "64,304"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run.

    Attributes:
        device: `cuda` or `cpu`.
        quick: Tiny sizes.
        seed: Seed of the race run.
        out: Directory of all results.
    """

    device: str
    quick: bool
    seed: int
    out: Path


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run: a process with a time limit.

    Attributes:
        minutes: Its share of the time limit of all parts.
        command: Returns the arguments of Python. Receives the options, the file for results and the seconds
            after which a measurement should stop by itself.
        read: Returns the results from the file.
        interpret: Whether the kernel runs in Triton's interpreter with `--device cpu`.
    """

    name: str
    summary: str
    minutes: float
    command: Callable[[Options, Path, float], list[str]]
    read: Callable[[Path], dict[str, Any]]
    interpret: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """A part that has ended.

    Attributes:
        status: `passed`, `failed` or `time limit`.
        output: The end of its output.
        result: Its measurements, possibly incomplete; empty if there are none.
    """

    name: str
    status: str
    seconds: float
    command: str
    output: str = ""
    result: dict[str, Any] = field(default_factory=dict)


def gpu_tests() -> list[str]:
    """Return the test files with the marker `gpu`. Others are not imported: they may need vLLM."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if MARKER.search(path.read_text(encoding="utf-8"))]


def _tests(options: Options, result: Path, seconds: float) -> list[str]:
    command = ["-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={result}"]
    if options.device == "cuda":
        # A test that hangs ends with a traceback, and before the time limit of the part, at which no results are kept.
        return [*command, f"--timeout={seconds / 2:.0f}", "-m", "gpu", *gpu_tests()]
    interpreted = INTERPRETED_TESTS[:1] if options.quick else INTERPRETED_TESTS
    return [*command, *gpu_tests(), *interpreted]


def _example(options: Options, result: Path, seconds: float) -> list[str]:
    del seconds
    command = ["examples/transformers_generate.py", "--device", options.device, "--json", str(result)]
    return [*command, "--tokens", QUICK_TOKENS] if options.quick else command


def _vllm(options: Options, result: Path, seconds: float) -> list[str]:
    command = ["-m", "tools.gpu.serving", "--json", str(result), "--seconds", f"{seconds:.0f}"]
    return [*command, "--quick"] if options.quick else command


def _measurement(name: str) -> Callable[[Options, Path, float], list[str]]:
    def command(options: Options, result: Path, seconds: float) -> list[str]:
        made = ["-m", "tools.gpu.measurements", name, "--device", options.device, "--json", str(result)]
        made += ["--seconds", f"{seconds:.0f}", "--seed", str(options.seed)]
        return [*made, "--quick"] if options.quick else made

    return command


def read_json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def read_tests(path: Path) -> dict[str, Any]:
    """Return the counts of a JUnit file of pytest, and the names of failed tests."""
    suite = next(ET.parse(path).iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {**counts, "failed": failed}


PARTS = (
    Part("tests", "the tests marked gpu", 1.5, _tests, read_tests, interpret=False),
    Part("profile", "the copy path at every layout and block size", 2.0, _measurement("profile"), read_json),
    Part("example", "examples/transformers_generate.py at full size", 3.0, _example, read_json),
    Part("vllm", "a real vLLM, if it is installed", 7.0, _vllm, read_json, interpret=False),
    Part("race", "stores, loads and compute with random delays", 0.75, _measurement("race"), read_json),
    Part("bench", "python -m tools.benchmarks gpu", 0.75, _measurement("bench"), read_json),
)
"""In the order of their start: first those that have targets, last those that use all of their time."""


def run_part(part: Part, options: Options, limit: float) -> Ended:
    """Run a part in its own process group and wait for it, at most for `limit` seconds."""
    result = options.out / f"{part.name}.result"
    result.unlink(missing_ok=True)
    command = part.command(options, result, max(limit - SPARE_S, limit / 2))
    log = options.out / f"{part.name}.log"
    start = time.monotonic()
    made = environment(
        options.out / "metadata",
        device=options.device,
        interpret=part.interpret and options.device == "cpu",
    )
    # A part that is killed cannot delete its temporary files.
    with tempfile.TemporaryDirectory(prefix="tools-gpu-") as temporary:
        exit_status = run_logged(
            [sys.executable, *command],
            log,
            cwd=ROOT,
            environment=made | {"TMPDIR": temporary},
            timeout_s=limit,
        )
    status = "time limit" if exit_status is None else "failed" if exit_status else "passed"
    text = log.read_text(encoding="utf-8", errors="replace")
    try:
        measured = part.read(result)
    except (OSError, ValueError, ET.ParseError, StopIteration):
        measured = {}  # it ended before it had results
        status = "failed" if status == "passed" else status
    seconds = round(time.monotonic() - start, 1)
    return Ended(part.name, status, seconds, " ".join(["python", *command]), text[-4000:], measured)


def latest_ends(parts: Sequence[Part], minutes: float | None) -> list[float]:
    """Return when each part must have ended, in seconds from the start of the first one.

    A part also has the time that the parts before it have left.

    Args:
        parts: The parts, which run one after the other.
        minutes: Time limit of all together, divided by their shares; None for the sum of the shares.
    """
    ends = list(accumulate(part.minutes for part in parts))
    return [(minutes or ends[-1]) * 60 * end / ends[-1] for end in ends]


def cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if a part has not passed or a target is missed."""
    from tools.gpu.page import page, targets

    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu", description="Tests and measurements on a GPU."
    )
    parser.add_argument("--list", action="store_true", help="list the parts with their time limits")
    parser.add_argument(
        "--part", action="append", choices=[part.name for part in PARTS], help="run only this part"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit of all parts together; by default the sum of the listed times (--list)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the race run")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu simulates streams; cuda by default"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; figures have no meaning")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="directory for results; build/gpu by default"
    )
    parser.add_argument("--commit", help="commit of this tree, for a machine without git")
    given = parser.parse_args(arguments)
    if given.list:
        sys.stdout.writelines(f"{part.name:9}{part.minutes:5.1f} min  {part.summary}\n" for part in PARTS)
        return 0
    if given.device == "cuda" and not cuda_is_available():
        sys.stderr.write(
            "torch finds no CUDA device; --device cpu --quick runs all parts in small without one\n"
        )
        return 2
    options = Options(given.device, given.quick, given.seed, given.out.resolve())
    options.out.mkdir(parents=True, exist_ok=True)
    about = facts(options.device)
    if given.commit:
        about["commit"] = given.commit
    ended: list[Ended] = []
    chosen = [part for part in PARTS if not given.part or part.name in given.part]
    start = time.monotonic()
    for part, end in zip(chosen, latest_ends(chosen, given.minutes), strict=True):
        sys.stderr.write(f"{part.name}: {part.summary}\n")
        ended.append(run_part(part, options, start + end - time.monotonic()))
        sys.stderr.write(f"{part.name}: {ended[-1].status} after {ended[-1].seconds} s\n")
        if ended[-1].status != "passed":
            sys.stderr.write(f"{ended[-1].output}\n")
        # After each part, so that an interrupted run keeps its results.
        document = {"about": about, "quick": given.quick, "parts": [asdict(one) for one in ended]}
        (options.out / "gpu.json").write_text(
            json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8"
        )
        (options.out / "gpu.md").write_text(page(document), encoding="utf-8")
    found = targets(document)
    sys.stdout.writelines(f"{target}\n" for target in found)
    sys.stdout.write(f"{options.out / 'gpu.md'}\n")
    return int(any(one.status != "passed" for one in ended) or any(target.missed for target in found))
