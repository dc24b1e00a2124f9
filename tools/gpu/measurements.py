"""`python -m tools.gpu.measurements bench|profile|race`: one measurement in this process, with its results as JSON.

The results are written again whenever there is a new one, so that they survive the end of the process by a time limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from lmcache_async.bench.measure import DEFAULT_ROUNDS, Frame
from tools.benchmarks import gpu as bench
from tools.benchmarks.gpu_device import CudaGpu, Gpu, HostGpu
from tools.gpu import profile, race
from tools.torture.outcome import Outcome

PROFILE_ROUNDS = 5
QUICK_ENGINES = 3


async def run_bench(given: argparse.Namespace, gpu: Gpu) -> None:
    """`python -m tools.benchmarks gpu`; in quick form one model with one layer."""
    settings = bench.Settings()
    if given.quick:
        settings = replace(
            bench.QUICK, models="deepseek-mla", layers=1, chunks=(1,), load_chunks=1, product_size=64
        )
    frame = Frame(rounds=1 if given.quick else DEFAULT_ROUNDS, quick=given.quick)
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + given.seconds
    async for row in bench.measure(settings, frame, gpu):
        rows.append(row.as_dict())
        if time.monotonic() > deadline:
            frame.leave_out("the rest", "the time limit was reached")
        save(given.json, {"rows": rows, "left_out": frame.left_out})
        if time.monotonic() > deadline:
            return
    save(given.json, {"rows": rows, "left_out": frame.left_out})


async def run_profile(given: argparse.Namespace, gpu: Gpu) -> None:
    settings = profile.QUICK if given.quick else profile.Settings()
    frame = Frame(rounds=1 if given.quick else PROFILE_ROUNDS, quick=given.quick)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    async for row in profile.profile(settings, frame, gpu, given.seconds):
        rows.setdefault((row["cache"], row["way"]), {}).update(row)
        save(given.json, {"rows": list(rows.values()), "left_out": frame.left_out})


async def run_race(given: argparse.Namespace, gpu: Gpu) -> None:
    def ended(outcome: Outcome) -> None:
        save(given.json, {"counts": outcome.counts, "problems": outcome.problems, "seconds": outcome.seconds})

    outcome = await race.run(
        gpu,
        race.QUICK if given.quick else race.Sizes(),
        seconds=given.seconds,
        seed=given.seed,
        most_engines=QUICK_ENGINES if given.quick else 0,
        ended=ended,
    )
    ended(outcome)
    if outcome.failed:
        raise SystemExit("\n".join(outcome.problems))


def save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")


MEASUREMENTS: dict[str, Callable[[argparse.Namespace, Gpu], Coroutine[Any, Any, None]]] = {
    "bench": run_bench,
    "profile": run_profile,
    "race": run_race,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.measurements", description=__doc__)
    parser.add_argument("name", choices=list(MEASUREMENTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    gpu = CudaGpu() if given.device == "cuda" else HostGpu()
    uvloop.run(MEASUREMENTS[given.name](given, gpu))  # the loop of the connector in vLLM
    return 0


if __name__ == "__main__":
    sys.exit(main())
