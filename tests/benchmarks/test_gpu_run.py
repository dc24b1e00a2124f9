"""`python -m tools.gpu` with the CPU as its device."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcache_async.bench.measure import Frame
from lmcache_async.device.movers import TorchMover
from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry
from tests.benchmarks.test_gpu import LossyMover
from tests.support import forked_python
from tools.benchmarks.gpu_device import HostGpu
from tools.gpu import checkout, command, measurements, profile, race
from tools.gpu.command import Options, Part
from tools.gpu.page import page, targets

pytestmark = pytest.mark.one_loop

ROOT = Path(__file__).parents[2]
SMALL_RACE = dataclasses.replace(race.QUICK, rounds=4)


class TorchGpu(HostGpu):
    """The host as a GPU, by default with torch's operations, which are faster than Triton's interpreter."""

    def __init__(self, mover=TorchMover):
        self.mover = mover


class ForgetfulMover(TorchMover):
    """A mover that stores the previous content of staging memory."""

    def move(self, steps, table, staging, *, to_staging):
        if not to_staging:
            super().move(steps, table, staging, to_staging=False)


class StrayMover(TorchMover):
    """A mover that overwrites the first bytes of the cache on each load."""

    def __init__(self, layout):
        super().__init__(layout)
        self.memory = layout.storages[0]

    def move(self, steps, table, staging, *, to_staging):
        super().move(steps, table, staging, to_staging=to_staging)
        if not to_staging:
            self.memory[:64] = 1


async def test_a_race_run_finds_no_problem_and_has_hits():
    outcome = await race.run(TorchGpu(), SMALL_RACE, seconds=600, seed=3, most_engines=3)

    assert outcome.problems == []
    assert outcome.counts["rounds"] == 12
    assert outcome.counts["loads that hit"] > 0
    assert outcome.counts["stored chunks"] > 0


@pytest.mark.parametrize(
    ("mover", "problem"),
    [
        (LossyMover, "elements of loaded KV are wrong"),
        (ForgetfulMover, "elements of loaded KV are wrong"),
        (StrayMover, "bytes were written after their copy ended"),
    ],
    ids=["lost row", "stale staging", "stray write"],
)
async def test_a_race_run_finds_a_broken_copy(mover, problem):
    outcome = await race.run(TorchGpu(mover), SMALL_RACE, seconds=600, seed=3, most_engines=3)

    assert any(problem in text for text in outcome.problems)


async def test_an_error_of_the_device_leaves_the_results_of_the_engines_before_it(tmp_path, monkeypatch):
    path, checks, check = tmp_path / "race.json", itertools.count(), race.Race.check

    def fails_in_the_second_engine(self):
        if next(checks) == race.QUICK.rounds:
            raise RuntimeError("illegal memory access")
        check(self)

    monkeypatch.setattr(race.Race, "check", fails_in_the_second_engine)
    given = argparse.Namespace(quick=True, seconds=600, seed=3, json=path)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await measurements.run_race(given, TorchGpu())

    assert json.loads(path.read_text())["counts"]["rounds"] == race.QUICK.rounds


async def test_the_profile_has_rates_and_calls_of_each_layout_and_block_size():
    rows = [row async for row in profile.profile(profile.QUICK, Frame(rounds=1), TorchGpu(), 3600)]

    caches = {
        f"deepseek-mla, bf16, {form}, blocks of {size}"
        for form in ("fused", "cross-layer blocks")
        for size in (16, 64)
    }
    rates = {(row["cache"], row["way"]) for row in rows if row.get("gb_per_s", 0) > 0}
    calls = {(row["cache"], row["way"]) for row in rows if "calls" in row}
    assert rates == calls == {(cache, way) for cache in caches for way in ("D2H", "H2D")}
    beside = {row["cache"] for row in rows if row.get("compute_slowdown", 0) > 0}
    assert beside == {cache for cache in caches if cache.endswith("blocks of 16")}


async def test_cases_too_slow_for_the_profile_are_skipped_with_a_line():
    frame = Frame(rounds=1)

    assert [row async for row in profile.profile(profile.QUICK, frame, TorchGpu(), -1)] == []
    assert len(frame.left_out) == 4
    assert all("the time limit was reached" in line for line in frame.left_out)


def test_calls_of_cuda_are_counted_by_kind():
    on_host = ["aten::copy_", "cudaMemcpyAsync", "cuLaunchKernelEx", "cudaEventSynchronize"]
    on_device = ["_move_rows", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"]
    events = [(name, False) for name in [*on_host, profile.COPY]]
    events += [(name, True) for name in [*on_device, profile.COPY]]

    assert profile.count_calls([*events, ("cudaDeviceSynchronize", False)]) == {
        "kernels": 1,
        "copies": 2,
        "waits for events": 1,
        "waits for streams": 0,
        "waits for the device": 1,
    }


def test_time_in_which_nothing_crosses_the_bus_is_summed():
    events = [
        profile.Event(profile.COPY, False, 100.0, 200.0),
        profile.Event("Memcpy HtoD (Pinned -> Device)", True, 104.0, 105.0),
        profile.Event("_move_rows", True, 105.0, 110.0),
        profile.Event("Memcpy DtoH (Device -> Pinned)", True, 110.0, 140.0),
        profile.Event("Memcpy DtoH (Device -> Pinned)", True, 130.0, 150.0),
        profile.Event("Memcpy DtoH (Device -> Pinned)", True, 155.0, 180.0),
    ]

    assert profile.idle_bus(events, "D2H") == {"before": 10.0, "between": 5.0, "after": 20.0}
    assert profile.idle_bus(events, "H2D") == {"before": 4.0, "between": 0.0, "after": 95.0}
    assert profile.idle_bus(events[1:], "D2H") == {}


def test_a_part_runs_in_a_process_of_its_own_and_its_results_are_on_the_page(tmp_path):
    arguments = ["--device", "cpu", "--quick", "--part", "race", "--minutes", "5"]
    arguments += ["--seed", "5", "--commit", "0123abc"]

    assert command.main([*arguments, "--out", str(tmp_path)]) == 0

    document = json.loads((tmp_path / "gpu.json").read_text())
    [part] = document["parts"]
    assert (part["name"], part["status"], part["result"]["problems"]) == ("race", "passed", [])
    assert part["result"]["counts"]["seed"] == 5
    text = (tmp_path / "gpu.md").read_text()
    assert "Commit `0123abc`" in text
    assert f"| torch | {torch.__version__} |" in text
    assert "| problems | 0 |" in text
    assert "Targets" not in text  # figures of a quick run have no meaning


def test_without_a_gpu_it_says_how_to_run_without_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "cuda_is_available", lambda: False)

    assert command.main(["--out", str(tmp_path)]) == 2
    assert "--device cpu --quick" in capsys.readouterr().err


def test_each_part_is_listed_with_its_time_limit(capsys):
    assert command.main(["--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tests", "profile", "example", "vllm", "race", "bench"]
    assert all(" min " in line for line in lines)


def test_all_parts_without_vllm_fit_in_a_command_of_ten_minutes_and_share_a_given_time():
    shares = {part.name: part.minutes for part in command.PARTS}

    assert command.latest_ends(command.PARTS, None)[-1] == sum(shares.values()) * 60
    assert sum(shares.values()) - shares["vllm"] <= 9.5
    tests, bench = command.latest_ends((command.PARTS[0], command.PARTS[-1]), 12)
    assert tests == pytest.approx(720 * shares["tests"] / (shares["tests"] + shares["bench"]))
    assert bench == 720


def profiled(cache: str, **figures: object) -> dict[str, object]:
    good = {
        "ratio": 0.99,
        "compute_slowdown": 1.01,
        "compute_cycles": 1.0,
        "model_thread_us": 4.0,
    }
    return {"cache": cache, "way": "D2H", "calls": {"waits for streams": 0}, **good, **figures}


def loaded(tokens: int, memory_s: float) -> dict[str, object]:
    disk = {"disk_s": 2.0, "read_s": 1.9}
    return {"tokens": tokens, "memory_s": memory_s, "bus_s": 0.9, "prefill_s": 10.0, **disk}


def test_a_missed_target_is_named_with_its_worst_figure_and_the_limit():
    profile_rows = [profiled("fused"), profiled("apart", ratio=0.9), profiled("blocks", ratio=0.95)]
    example_rows = [loaded(8192, 90.0), loaded(32768, 1.0)]
    document = {
        "quick": False,
        "parts": [
            {"name": "profile", "result": {"rows": profile_rows}},
            {"name": "example", "result": {"rows": example_rows}},
            {"name": "bench", "result": {}},
        ],
    }

    found = targets(document)

    assert [str(target) for target in found if target.missed] == [
        "MISSED: paged copy, ratio to one contiguous copy: 0.9, at least 0.97 (apart, D2H)"
    ]
    assert [(target.where, target.value) for target in found[-3:]] == [
        ("32768 tokens", 0.9),
        ("32768 tokens", 10),
        ("32768 tokens", 0.95),
    ]
    assert len(found) == 8
    assert targets({**document, "quick": True}) == []


@pytest.mark.parametrize(
    "figure",
    [
        {"compute_slowdown": 1.03},
        {"compute_cycles": 1.03},
        {"model_thread_us": 300.0},
        {"calls": {"waits for streams": 1}},
    ],
)
def test_slow_compute_and_waits_of_the_host_miss_their_targets(figure: dict[str, object]):
    document = {
        "quick": False,
        "parts": [{"name": "profile", "result": {"rows": [profiled("fused", **figure)]}}],
    }

    assert sum(target.missed for target in targets(document)) == 1


def child(*arguments: str) -> Part:
    return Part("race", "a child", 1.0, lambda options, result, seconds: list(arguments), command.read_json)


def test_a_part_that_exceeds_its_time_limit_is_ended_and_its_temporary_files_are_deleted(tmp_path):
    program = "import signal, tempfile; print(tempfile.mkdtemp(), flush=True); signal.pause()"

    ended = command.run_part(child("-c", program), Options("cpu", True, 0, tmp_path), 1.0)

    assert ended.status == "time limit"
    assert ended.result == {}
    assert ended.output.strip()
    assert not Path(ended.output.strip()).exists()


@pytest.mark.parametrize("module", ["tools.gpu", "tools.gpu.serving"])
def test_sigterm_ends_the_processes_of_a_run(module, tmp_path):
    """A limit on the command from outside must not leave processes that use the GPU."""
    fifo, program = tmp_path / "fifo", tmp_path / "program.py"
    os.mkfifo(fifo)
    program.write_text(
        "import runpy, subprocess, sys\n"
        "from importlib.machinery import ModuleSpec\n"
        f"sleep = ['sh', '-c', 'exec 5>{fifo}; sleep 1000']\n"
        "class Process(subprocess.Popen):\n"
        "    def __init__(self, command, **options):\n"
        "        super().__init__(sleep if command[0] == sys.executable else command, **options)\n"
        "        self.told = self.args is not sleep\n"
        "    def tell(self):\n"
        "        if not self.told: print('waits', flush=True)\n"
        "        self.told = True\n"
        "    def wait(self, timeout=None):\n"
        "        self.tell()\n"
        "        return super().wait(timeout)\n"
        "    def poll(self):\n"
        "        self.tell()\n"
        "        return super().poll()\n"
        "subprocess.Popen = Process\n"
        "sys.modules.setdefault('vllm', type(sys)('vllm')).__spec__ = ModuleSpec('vllm', None)\n"
        f"arguments = {{'tools.gpu': ['--device', 'cpu', '--part', 'race', '--out', {str(tmp_path)!r}],\n"
        f"             'tools.gpu.serving': ['--json', {str(tmp_path / 'json')!r}]}}\n"
        f"sys.argv = ['module', *arguments[{module!r}]]\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )

    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run,
        fifo.open() as child,
    ):
        assert run.stdout is not None
        assert run.stdout.readline() == "waits\n"
        run.terminate()
        assert child.read() == ""  # returns when the child has ended
    assert run.returncode == 128 + signal.SIGTERM


def test_a_part_without_results_has_failed_and_its_output_is_on_the_page(tmp_path):
    ended = command.run_part(child("-c", "print('no results')"), Options("cpu", True, 0, tmp_path), 60)

    assert (ended.status, ended.output) == ("failed", "no results\n")
    about = {"commit": "0123abc", "date": "today", "device": "none"}
    assert "no results" in page({"about": about, "quick": False, "parts": [dataclasses.asdict(ended)]})


def test_failed_tests_are_named(tmp_path):
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0">'
        '<testcase classname="tests.gpu.a" name="good"/>'
        '<testcase classname="tests.gpu.a" name="bad"><failure/></testcase></testsuite></testsuites>'
    )

    result = command.read_tests(tmp_path / "junit.xml")

    assert result["failed"] == ["tests.gpu.a.bad"]
    assert result["tests"] == 2


def test_a_checkout_that_is_not_installed_has_all_plugins(tmp_path):
    checkout.write_metadata(tmp_path)

    found, installed = Registry([str(tmp_path)]), Registry()

    for group in (TIERS, STAGES, LAYERS):
        expected = installed.available(group, third_party=False)
        assert found.available(group).keys() == expected.keys()


def test_a_test_that_hangs_ends_long_before_the_tests_reach_their_time_limit(tmp_path):
    """At the time limit pytest is ended and writes no results."""
    tests = command.PARTS[0]
    seconds = 60 * tests.minutes - command.SPARE_S

    arguments = tests.command(Options("cuda", False, 0, tmp_path), tmp_path / "result", seconds)

    [limit] = [word.removeprefix("--timeout=") for word in arguments if word.startswith("--timeout=")]
    assert 2 * float(limit) <= seconds


def test_every_file_with_a_gpu_test_is_run():
    assert command.gpu_tests() == [
        "tests/gpu/test_bench_gpu.py",
        "tests/gpu/test_copier_gpu.py",
        "tests/gpu/test_race_gpu.py",
        "tests/unit/test_region.py",
    ]


def test_nothing_that_runs_on_a_gpu_machine_needs_packages_that_it_lacks(tmp_path):
    program = tmp_path / "bare.py"
    program.write_text(
        "import sys, runpy\n"
        "for name in ('aiohttp', 'httpx', 'psutil', 'rich', 'typer', 'vllm'):\n"
        "    sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import tools.gpu.measurements, tools.gpu.command\n"
        "from lmcache_async.bench.memory import PromptCache, Settings\n"
        "PromptCache(Settings(tokens=256, layers=1, heads=1))\n"
        f"for name in {command.gpu_tests()!r}:\n"
        f"    runpy.run_path({str(ROOT)!r} + '/' + name)\n"
        "print('imported', sys.version_info[:2])\n"
    )

    ended = forked_python.run(str(program), cwd=tmp_path, timeout_s=250)

    assert ended.status == 0, ended.output
    assert f"imported {sys.version_info[:2]}" in ended.output
