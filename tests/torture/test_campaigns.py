"""Small runs of each campaign of `make torture`, also with injected bugs, which must be reported."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_async.memory.buffer import Buffer
from lmcache_async.stages.verify import VerifyStage
from tests.integration.vllm_answers import Answer, Question
from tests.integration.vllm_driver import Reference
from tests.simulation.base import SimulationReport
from tests.simulation.world import simulate as run_simulation
from tests.support import forked_python
from tools.torture import __main__ as main
from tools.torture import churn, flips, fuzz, kill, simulate, traffic
from tools.torture.options import Options
from tools.torture.outcome import Outcome
from tools.torture.trend import Sample, trend

ROOT = Path(__file__).parents[2]


class SharedWriters(kill.Writers):
    """A program shared by campaigns, because importing torch takes seconds."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def writers():
    shared = SharedWriters()
    yield shared
    kill.Writers.close(shared)


def test_stored_chunks_survive_kills(monkeypatch, writers):
    monkeypatch.setattr(kill, "Writers", lambda: writers)

    outcome = kill.run(kills=4, seconds=0, seed=3)

    assert outcome.problems == []
    assert outcome.counts["kills"] == 4


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [(Path.unlink, "are missing"), (change, "not served")],
)
def test_lost_and_changed_records_are_reported(monkeypatch, tmp_path, writers, harm, expected):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a directory with a problem is kept
    monkeypatch.setattr(kill, "Writers", lambda: writers)
    live = writers.run

    def harmful(path: Path, *arguments: Any, **options: Any) -> kill.Life:
        life = live(path, *arguments, **options)
        if life.stored:
            harm(next(path.glob("??/*")))
        return life

    monkeypatch.setattr(writers, "run", harmful)

    outcome = kill.run(kills=200, seconds=0, seed=3)  # it ends at the first problem

    assert any(expected in problem for problem in outcome.problems)


def test_damage_is_never_served():
    outcome = flips.run(damages=60, seconds=0, seed=3)

    assert outcome.problems == []
    assert outcome.counts["damages"] == 60
    assert outcome.counts["misses"] > 40


def test_served_damage_is_reported(monkeypatch):
    monkeypatch.setattr(VerifyStage, "_needs_checksum", lambda *_: False)

    outcome = flips.run(damages=60, seconds=0, seed=3)

    assert any("wrong slots" in problem for problem in outcome.problems)


def test_churn_leaves_nothing():
    outcome = churn.run(operations=100, seconds=10, seed=3)

    assert outcome.problems == []
    assert outcome.counts["operations"] >= 8
    assert outcome.counts["chunks stored"] > 0


def test_a_lost_lease_is_reported(monkeypatch):
    calls = iter(range(1 << 30))
    release = Buffer.release

    def forgetful(buffer: Buffer) -> None:
        if next(calls) != 50:
            release(buffer)

    monkeypatch.setattr(Buffer, "release", forgetful)

    outcome = churn.run(operations=100, seconds=10, seed=3)

    assert any("still leased" in problem for problem in outcome.problems)


@pytest.mark.parametrize(
    ("grows", "expected"),
    [
        ({}, []),
        ({"rss": 1 << 20}, ["RSS"]),
        ({"descriptors": 1}, ["descriptors"]),
        ({"threads": 1}, ["threads"]),
    ],
    ids=["nothing", "rss", "descriptors", "threads"],
)
def test_growth_is_reported(grows, expected):
    first = Sample(operations=0, rss=1 << 28, descriptors=16, threads=9)
    samples = [
        replace(
            first, operations=1000 * i, **{name: getattr(first, name) + i * by for name, by in grows.items()}
        )
        for i in range(1, 17)
    ]
    outcome = Outcome("churn")

    churn.judge(samples, outcome)

    assert [problem.split()[0] for problem in outcome.problems] == expected


def test_simulated_operations_keep_every_promise(monkeypatch):
    monkeypatch.setattr(simulate, "STEPS", 200)

    outcome = simulate.run(operations=1, seconds=0, seed=3)

    assert outcome.problems == []
    assert outcome.counts["operations"] >= simulate.STEPS


def test_a_violation_is_reported_with_the_command_that_replays_it(monkeypatch):
    def violated(seed: int, **options: Any) -> SimulationReport:
        return replace(run_simulation(seed, **options | {"steps": 1}), violation="a wrong byte")

    monkeypatch.setattr(simulate, "simulate", violated)

    outcome = simulate.run(operations=1, seconds=0, seed=3)

    assert outcome.problems == [
        "a wrong byte; replay: python -m tools.simulate --seed 3 --steps 1 --faults some"
    ]


class FakeVLLM:
    """Replaces a vLLM of `traffic`. A vLLM with `held` blocks does not free them; with `wrong`, answers have other tokens."""

    def __init__(self, *, held: int = 0, wrong: bool = False) -> None:
        self.calls: set[str] = set()
        self._held = held
        self._token = 4 if wrong else 3

    def add(self, question: Question) -> list[str]:
        self.calls.add("add")
        return [f"q{len(question.prompt)}"]

    def ask(self, question: Question) -> Answer:
        return self.take("")

    def take(self, name: str) -> Answer:
        best = {"3": -0.1, "4": -0.2, "5": -1.0, "6": -2.0, "7": -3.0}
        return Answer(64, "length", [self._token], [best], 0.0)

    def settle(self) -> None:
        self.calls.add("settle")

    def call(self, name: str, **arguments: Any) -> Any:
        self.calls.add(name)
        return (40 - self._held, 40) if name == "free_blocks" else True


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (FakeVLLM(), ""),
        (FakeVLLM(held=2), "2 blocks are held"),
        (FakeVLLM(wrong=True), "log-probabilities are inf apart"),
    ],
    ids=["nothing", "blocks", "answers"],
)
def test_wrong_answers_and_held_blocks_are_reported(engine, expected):
    outcome = Outcome("traffic")
    tested = traffic.Traffic(engine, Reference(FakeVLLM()), random.Random(3), outcome, name="llama")

    for _ in range(40):
        tested.round()

    assert engine.calls >= {"add", "abort", "reset", "step", "run", "settle", "free_blocks"}
    assert outcome.counts["requests"] > 100
    assert bool(outcome.problems) == bool(expected)
    assert all(expected in problem for problem in outcome.problems)


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("def test_a(): assert float(os.environ['LMCACHE_ASYNC_FUZZ_SECONDS']) > 0.04", ""),
        ("def test_a(): assert 0, 'a crash'", "a crash"),
        ("", "there are no tests"),
    ],
)
def test_fuzzing_shares_its_time_and_reports_failures(monkeypatch, tmp_path, test, problem):
    (tmp_path / "tests" / "fuzz").mkdir(parents=True)
    (tmp_path / "tests" / "fuzz" / "test_it.py").write_text(f"import os\n{test}\n")
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    # Importing the plug-ins takes longer than the test.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")

    outcome = fuzz.run(seconds=0.5)

    assert bool(outcome.problems) == bool(problem)
    assert problem in "".join(outcome.problems)


def test_a_trend_is_the_line_and_the_difference_of_quarters():
    flat = trend(range(16), [5.0] * 16)
    rising = trend(range(0, 1600, 100), [float(i) for i in range(16)])

    assert (flat.growth, flat.per_million) == (0.0, pytest.approx(0.0, abs=1e-6))
    assert rising.growth == 8.0
    assert rising.per_million == pytest.approx(10_000.0)
    with pytest.raises(ValueError, match="7 samples"):
        trend(range(7), [1.0] * 7)


@pytest.mark.parametrize(
    ("kills", "seconds", "goes_on"),
    [(2, 0.0, True), (3, 0.0, False), (4, 0.0, False), (2, 1e-9, False), (4, 3600.0, True)],
)
def test_a_campaign_ends_at_its_count_or_after_its_seconds(kills, seconds, goes_on):
    outcome = Outcome("kill", {"kills": kills})

    assert outcome.left("kills", 3, seconds) is goes_on


def test_the_command_runs_one_campaign_and_saves_its_figures(tmp_path):
    path = tmp_path / "build" / "figures.json"
    arguments = ["flips", "--damages", "5", "--seed", "1", "--json", str(path)]
    program = f"""
import runpy
import sys

sys.argv[1:] = {arguments}
runpy.run_module("tools.torture", run_name="__main__")
"""
    (tmp_path / "torture.py").write_text(program, encoding="utf-8")

    done = forked_python.run("torture.py", cwd=tmp_path, path=[ROOT])

    assert done.status == 0, done.output
    assert "no problem" in done.output
    figures = json.loads(path.read_text())
    assert [result["campaign"] for result in figures["results"]] == ["flips"]
    assert figures["results"][0]["counts"]["damages"] == 5


def test_a_campaign_that_fails_itself_is_a_problem(monkeypatch):
    def broken(**_: Any) -> Outcome:
        raise FileNotFoundError("no such record")

    monkeypatch.setattr(flips, "run", broken)

    outcome = main.run("flips", Options(seed=1))

    assert outcome.name == "flips"
    assert "FileNotFoundError: no such record" in outcome.problems[0]
