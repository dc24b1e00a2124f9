"""`python -m tools.benchmarks`: each benchmark with small sizes, options and files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_async.bench.measure import Row
from lmcache_async.cli.app import app
from tools.benchmarks import command

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = ["hash", "--quick", "--tokens", "1024", "--rounds", "1"]
OTHERS = {"groups", "peers", "serve"}  # their tests have fakes of their processes
NAMES = [benchmark.name for benchmark in command.BENCHMARKS if benchmark.available]

ROWS = {
    "hash": {"xxh3_128, int32 array, whole", "blake3, int64 array, in steps", "sha256, list, whole"},
    "lookup": {"engine, keys", "engine, keys, pinned", "scheduler connector, hashed before"},
    "loop": {"store, 64 chunks in batches of 16", "retrieve, 8 chunks in batches of 1"},
    "scheduler": {"request: hit", "request: miss, with its stores", "call: on_new_request"},
    "valkey": {"put, records of 1 MiB", "get, records of 1 MiB"},
    "s3": {"put, records of 1 MiB", "get, records of 1 MiB", "get, records of 2 MiB"},
    "mooncake": {"put, records of 1 MiB", "get, records of 1 MiB"},
    "host": {
        "put, records of 1 MiB",
        "get and read, records of 1 MiB",
        "lease and release, records of 1 MiB",
    },
    "gpu": {"llama-8b, bf16, fused: D2H, 1 chunk", "product beside H2D, priority high"},
}

LIMITS = {
    "hash": {"bare xxh3_128, chunk by chunk", "bare sha256, chunk by chunk", "np.array(list, int32)"},
    "lookup": {"one dict lookup a key", "echo through a unix socket"},
    "loop": {"one asyncio.sleep(0)", "one thread hop", "one a batch"},
    "scheduler": {"array('i', tokens)"},
    "valkey": {"bare sockets", "redis-py"},
    "s3": {"bare HTTP", "obstore"},
    "mooncake": {"Mooncake's client", "Mooncake's client, one call"},
    "host": {"memcpy, 1 thread", "memcpy, 2 threads", "thread hop"},
    "gpu": {"memcpy, same pieces", "memcpy, one piece", "product alone"},
}


def without(monkeypatch, missing):
    """Hide a package from `find_spec`."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else find_spec(name, *rest)
    )


def test_the_table_of_expectations_is_complete():
    names = {benchmark.name for benchmark in command.BENCHMARKS}
    assert set(ROWS) == set(LIMITS) == names - OTHERS


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERS])
def test_a_quick_run_writes_every_figure_beside_its_limit(name, tmp_path, capsys):
    path = tmp_path / "figures.json"

    code = command.main([name, "--quick", "--rounds", "1", "--json", str(path)])

    whole = json.loads(path.read_text())
    rows = whole["benchmarks"][name]["rows"]
    assert code == 0
    assert whole["quick"]
    assert whole["rounds"] == 1
    assert {"date", "cores", "cpu", "memory_gib", "kernel", "python", "torch", "numpy"} <= set(
        whole["machine"]
    )
    assert {row["name"] for row in rows} >= ROWS[name]
    assert {row["limit_name"] for row in rows} >= LIMITS[name]
    told = capsys.readouterr().out
    for row in rows:
        assert row["name"] in told
        for figure in ("value", "limit_value", "ratio"):
            assert 0 < row[figure] < math.inf, row
        assert row["better"] == ("more" if row["unit"].endswith("/s") else "less")
        assert row["parameters"]
        assert len(row["ratios"]) == (0 if name == "scheduler" else 1)


def test_all_is_every_benchmark_that_can_run_here_in_a_minute():
    assert [benchmark.name for benchmark in command.find("all")] == [
        name for name in NAMES if name not in ("serve", "groups")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hsh"], "there is no benchmark 'hsh'; did you mean 'hash'? there are: hash, lookup"),
        (["Peers"], "did you mean 'peers'?"),
        (
            ["hash", "--tokns", "5"],
            "benchmark hash has no option --tokns; did you mean --tokens? its own are --tokens",
        ),
        (["hash", "--raunds=5"], "benchmark hash has no option --raunds; did you mean --rounds?"),
        (
            ["hash", "--tokens", "many"],
            "benchmark hash: argument --tokens: expected a whole number of at least 1, not 'many'",
        ),
        (["all", "--tokens", "5"], "--tokens is not an option of all: name one benchmark"),
    ],
)
def test_a_wrong_argument_ends_with_2_and_a_message(arguments, message, capsys):
    assert command.main(arguments) == 2

    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


def test_figures_name_the_commit_if_there_is_git(monkeypatch, tmp_path):
    known = []
    for number, git in enumerate((True, False)):
        if not git:
            monkeypatch.setenv("PATH", "")
        path = tmp_path / f"{number}.json"
        assert command.main([*SMALL, "--json", str(path)]) == 0
        known.append("commit" in json.loads(path.read_text())["machine"])

    assert known == [True, False]


def test_a_benchmark_without_its_package_is_refused_and_left_out_of_all(monkeypatch, capsys):
    without(monkeypatch, "vllm")

    assert command.main(["scheduler"]) == 2
    assert "scheduler needs vllm, which is not installed: pip install vllm" in capsys.readouterr().err
    assert "scheduler" not in [benchmark.name for benchmark in command.find("all")]


@pytest.mark.parametrize("there", [False, True])
def test_the_gpu_benchmark_needs_a_gpu(monkeypatch, capsys, there):
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)

    assert ("gpu" in [benchmark.name for benchmark in command.find("all")]) == there
    if there:
        assert command.find("gpu")[0].load().quick.layers == 2
    else:
        assert command.main(["gpu", "--quick"]) == 2
        assert "the benchmark gpu needs a CUDA device" in capsys.readouterr().err
        assert "left out, needs a CUDA device: gpu" in command.left_out()


def test_skipped_cases_of_a_benchmark_are_reported_with_its_figures(tmp_path, monkeypatch, capsys):
    async def measure(settings, frame):
        yield Row.of("it", "ms", [1.0], "limit", [2.0], {"of": 1})
        frame.leave_out("a large one", "it does not fit")

    settings = command.find("hash")[0].load().quick
    monkeypatch.setattr(command.Benchmark, "load", lambda _: command.Loaded(measure, settings, settings))

    assert command.main(["hash", "--rounds", "1", "--json", str(tmp_path / "figures.json")]) == 0

    assert capsys.readouterr().out.splitlines()[-1] == "left out: a large one: it does not fit"
    written = json.loads((tmp_path / "figures.json").read_text())["benchmarks"]["hash"]
    assert written["left_out"] == ["a large one: it does not fit"]


@pytest.mark.parametrize("line", [x for block in SHELL.findall(PAGE.read_text()) for x in block.splitlines()])
def test_a_command_of_the_page_is_accepted(line, monkeypatch):
    words = shlex.split(line, comments=True)
    if words[:2] == ["lmcache-async", "bench"]:
        assert CliRunner().invoke(app, [*words[1:3], "--help"]).exit_code == 0
    elif words[:2] == ["pip", "install"]:
        assert words[2] == ".[cli]"
    else:
        assert words[:3] == ["python", "-m", "tools.benchmarks"]
        monkeypatch.setattr(command, "_results", lambda given, own: chosen.append((given, own)) or ())
        chosen = []
        assert command.main(words[3:]) == 0
        [(given, own)] = chosen
        if given.name != "all":
            loaded = command.find(given.name)[0]
            assert not loaded.available or command.settings_of(loaded.load(), given.name, own, quick=True)


def test_the_page_names_every_benchmark_and_every_option():
    text = PAGE.read_text()

    for benchmark in command.BENCHMARKS:
        assert f"## `{benchmark.name}`" in text
        if benchmark.needs == command.CUDA:
            from tools.benchmarks.gpu import Settings

            usual = Settings()
        else:
            usual = benchmark.load().usual
        section = text.partition(f"## `{benchmark.name}`")[2].partition("\n## ")[0]
        for field in dataclasses.fields(usual):
            if "help" in field.metadata and (field.name != "part_mib" or benchmark.name == "s3"):
                flag, value = "--" + field.name.replace("_", "-"), getattr(usual, field.name)
                assert f"| `{flag}` | {value} |".replace("  ", " ") in section, (benchmark.name, flag)
