"""The connector in a real vLLM on a GPU: answers, hits, and times to the first token.

Each model has the shape of a known one and random weights, made on the GPU. Four engines run one after the other: vLLM
without connector, with this connector, again with this connector after a restart, and with vLLM's own
OffloadingConnector. Prompts are computed, answered from vLLM's prefix cache, and loaded after that
cache was emptied. All prompts are one token longer than their chunks. So the answer after a load and the one from vLLM's
prefix cache are computed from the same tokens, and must be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.serving_engine import MAX_TOKENS, MODELS, Settings
from tools.processes import end_group, exit_on_sigterm

ENGINES = ("plain", "ours", "restarted", "offloading")
ENGINES_OF_A_CPU = ENGINES[:3]

TOLERANCE = 0.01
"""Of log-probabilities, for equal computations. One token changed near the end changes them by more than five times this."""

BATCH_TOLERANCE = 0.5
"""Of log-probabilities of the first token in bfloat16, if the rest of the batch differs."""


def difference(one: Mapping[str, Any], other: Mapping[str, Any], places: int = MAX_TOKENS) -> float:
    """Return the largest difference of a log-probability; infinite if tokens differ."""
    largest = 0.0
    for index in range(places):
        ours, theirs = one["logprobs"][index], other["logprobs"][index]
        both = ours.keys() & theirs.keys()
        if places > 1 and one["tokens"][index] != other["tokens"][index]:
            return math.inf
        if not both:
            return math.inf
        largest = max([largest, *(abs(ours[name] - theirs[name]) for name in both)])
    return largest


class Judge:
    """Compares the answers and hits of the engines of one model, and collects their times.

    Args:
        quick: The weights of a tiny model on a CPU are not those that were asked for, so that a changed token changes
            the answer too little.

    Attributes:
        problems: What is wrong, in words.
    """

    def __init__(self, model: str, engines: Mapping[str, Mapping[str, Any]], *, quick: bool) -> None:
        self.problems: list[str] = []
        self._model = model
        self._times: dict[int, dict[str, list[float]]] = {}
        self._waits: dict[int, dict[str, list[float]]] = {}
        plain = engines.get("plain", {}).get("rows", [])
        for name, found in engines.items():
            for index, row in enumerate(found["rows"]):
                self._row(name, row, plain[index] if plain else None)
            self._batch(name, found["batch"])
            change = difference(found["changed"], found["rows"][0]["own"], 1)
            if change < 5 * TOLERANCE and not quick:
                self._problem(f"{name}: one changed token changes the answer by only {change:.3g}")

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each length: median seconds until the first token, and those before the first step."""
        return [
            {
                "model": self._model,
                "tokens": tokens,
                "ttft_s": _medians(taken),
                "wait_s": _medians(self._waits[tokens]),
            }
            for tokens, taken in self._times.items()
        ]

    def _row(self, name: str, row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        what = f"{name}, prompt {row['number']} of {row['tokens']} tokens"
        restarted = name == "restarted"
        first, own = row["first"], row["own"]
        self._time(row, f"{name}: disk" if restarted else f"{name}: computed", first)
        self._time(row, f"{name}: prefix cache", own)
        if plain is not None and name != "plain":
            self._same(f"{what}, first answer", first, plain["own" if restarted else "first"])
            self._same(f"{what}, vLLM's prefix cache", own, plain["own"])
        if restarted and first["cached_tokens"] < own["cached_tokens"]:
            self._problem(f"{what}: {first['cached_tokens']} tokens from disk")
        for load in row["loads"]:
            self._same(f"{what}, loaded", load, own)
            if not restarted:
                self._time(row, f"{name}: memory", load)
            if name != "offloading" and load["cached_tokens"] < own["cached_tokens"]:
                self._problem(
                    f"{what}: {load['cached_tokens']} tokens loaded, vLLM's prefix cache has {own['cached_tokens']}"
                )

    def _batch(self, name: str, batch: Mapping[str, Any]) -> None:
        for number, (first, again) in enumerate(zip(batch["first"], batch["again"], strict=True)):
            loaded = {"ours": [again], "restarted": [first, again]}.get(name, [])
            if any(each["cached_tokens"] < batch["tokens"] - 1 for each in loaded):
                self._problem(f"{name}, prompt {number} of the batch: not all of its tokens were loaded")
            if (distance := difference(first, again, 1)) > BATCH_TOLERANCE:
                self._problem(
                    f"{name}, prompt {number} of the batch: log-probabilities differ by {distance:.3g}"
                )

    def _time(self, row: Mapping[str, Any], name: str, answer: Mapping[str, Any]) -> None:
        self._times.setdefault(row["tokens"], {}).setdefault(name, []).append(answer["ttft_s"])
        self._waits.setdefault(row["tokens"], {}).setdefault(name, []).append(answer["wait_s"])

    def _same(self, what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        if (distance := difference(one, other)) > TOLERANCE:
            self._problem(f"{what}: log-probabilities differ by {distance:.3g}")

    def _problem(self, text: str) -> None:
        self.problems.append(f"{self._model}, {text}")


def _medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in taken.items()}


class Engines:
    """Runs engines, and writes all results to `path` whenever one ends."""

    def __init__(self, chosen: Sequence[Settings], path: Path) -> None:
        self._missing = list(chosen)
        self._path = path
        self._quick = any(settings.quick for settings in chosen)
        self._found: dict[str, dict[str, Any]] = {settings.model: {} for settings in chosen}
        self._failed: list[str] = []

    def run(self, seconds: float) -> list[str]:
        """Run all engines, at most for this time; return the problems."""
        deadline = time.monotonic() + seconds
        command = [sys.executable, "-m", "tools.gpu.serving_engine"]
        command.append(json.dumps([dataclasses.asdict(settings) for settings in self._missing]))
        process = subprocess.Popen(command, start_new_session=True)
        try:
            ended = False
            while self._missing and not ended:
                time.sleep(0.1)
                ended = process.poll() is not None or time.monotonic() > deadline
                self._collect()
        finally:
            end_group(process)
        self._failed += [f"{each.model}, {each.engine}: no result" for each in self._missing]
        return self._write()

    def _collect(self) -> None:
        """Read the results of the engines that have ended since the last call."""
        for settings in [each for each in self._missing if each.result.exists()]:
            self._missing.remove(settings)
            result = json.loads(settings.result.read_text(encoding="utf-8"))
            if "failed" in result:
                self._failed.append(f"{settings.model}, {settings.engine}: {result['failed']}")
            else:
                self._found[settings.model][settings.engine] = result
            self._write()

    def _write(self) -> list[str]:
        judges = [Judge(model, found, quick=self._quick) for model, found in self._found.items()]
        problems = self._failed + [problem for judge in judges for problem in judge.problems]
        result = {
            "rows": [row for judge in judges for row in judge.rows()],
            "problems": problems,
            "left_out": [],
            "engines": self._found,
        }
        self._path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
        return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.serving", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="both by default")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="all by default")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, also on a CPU; times have no meaning"
    )
    parser.add_argument(
        "--graphs", action="store_true", help="with torch.compile and CUDA graphs, as vLLM's default"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="more options of vllm.LLM, as JSON")
    parser.add_argument("--config", type=json.loads, default={}, help="more configuration keys, as JSON")
    given = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        nothing = {"rows": [], "problems": [], "left_out": ["vLLM is not installed"], "engines": {}}
        given.json.write_text(json.dumps(nothing) + "\n", encoding="utf-8")
        return 0
    import torch

    engines = given.engine or (ENGINES if torch.cuda.is_available() else ENGINES_OF_A_CPU)
    engines = sorted(engines, key=ENGINES.index)  # `restarted` loads what `ours` has stored
    with tempfile.TemporaryDirectory(prefix="serving-") as directory:
        chosen = [
            Settings(
                model,
                name,
                directory,
                lengths=(385, 769) if given.quick else (2049, 8193, 32769),
                eager=not given.graphs,
                quick=given.quick,
                options=given.options,
                config=given.config,
            )
            for model in given.model or MODELS
            for name in engines
        ]
        problems = Engines(chosen, given.json).run(given.seconds)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return int(bool(problems))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
