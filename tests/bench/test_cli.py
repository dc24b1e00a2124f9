"""`lmcache-async bench`, and the same as `python -m lmcache_async.bench`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import shlex
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_async.bench import command, report, runner, table
from lmcache_async.bench.frame import Row
from lmcache_async.bench.hash import Settings
from lmcache_async.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = ["hash", "--quick", "--tokens", "1024", "--rounds", "1"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def without(monkeypatch, missing):
    """As if a package were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else find_spec(name, *rest)
    )


def test_bench_tells_each_figure_and_writes_json(tmp_path):
    path = tmp_path / "figures.json"

    result = invoke(*SMALL, "--json", str(path))

    assert result.exit_code == 0, result.output
    whole = json.loads(path.read_text())
    assert whole["benchmarks"]["hash"]["settings"]["tokens"] == 1024
    assert all(row["name"] in result.stdout for row in whole["benchmarks"]["hash"]["rows"])


def test_the_report_is_a_page_with_plots(tmp_path):
    result = invoke(*SMALL, "--report", str(tmp_path / "report"))

    assert result.exit_code == 0, result.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "hash.png"}
    assert (tmp_path / "report" / "hash.png").read_bytes().startswith(b"\x89PNG")
    assert '<img src="hash.png"' in page
    assert "np.array(list, int32)" in page
    assert "the figures mean nothing" in page


def test_what_a_report_shows_cannot_be_markup():
    row = {"name": "<b>", "unit": "ms", "better": "less", "limit_name": "&", "ratios": [], "parameters": {}}
    row |= {"value": 1.0, "limit_value": 1.0, "ratio": 1.0, "more": {}}
    result = {"summary": "<i>", "seconds": 1.0, "rows": [row], "left_out": ["<s>"]}

    page = report._page({"machine": {"cpu": "<u>"}, "quick": False, "rounds": 1, "benchmarks": {"x": result}})

    assert not {"<b>", "<i>", "<u>", "<s>"} & set(re.findall(r"<.>", page))


@pytest.mark.parametrize(("name", "near"), [("hsh", "hash"), ("Disk", "disk"), ("checksum", "checksums")])
def test_an_unknown_name_is_told_with_the_nearest_right_one(name, near):
    result = invoke(name)

    assert result.exit_code == 2
    assert f"there is no benchmark {name!r}; did you mean {near!r}? there are: hash, lookup" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--tokns", "5"],
            "benchmark hash has no option --tokns; did you mean --tokens? its own are --tokens",
        ),
        (["--raunds=5"], "benchmark hash has no option --raunds; did you mean --rounds?"),
        (
            ["--tokens", "many"],
            "benchmark hash: argument --tokens: expected a whole number of at least 1, not 'many'",
        ),
    ],
)
def test_a_wrong_option_is_told_before_anything_runs(options, told):
    result = invoke("hash", *options)

    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


def test_sizes_that_do_not_fit_are_told():
    result = invoke("arena", "--quick", "--tokens", "1000")

    assert result.exit_code == 2
    assert (
        "1000 tokens in chunks of 256 in blocks of 16: each must be a multiple of the next" in result.stderr
    )


def test_all_takes_no_options_of_single_benchmarks():
    result = invoke("all", "--tokens", "5")

    assert result.exit_code == 2
    assert "--tokens is no option of all: name the benchmark it is of" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["hash", "--rounds", "0"]])
def test_a_wrong_call_ends_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


def test_a_report_without_matplotlib_names_the_extra_before_anything_runs(monkeypatch, tmp_path):
    without(monkeypatch, "matplotlib")

    result = invoke(*SMALL, "--report", str(tmp_path / "report"))

    assert result.exit_code == 2
    assert "--report needs the package matplotlib" in result.stderr
    assert "pip install 'lmcache-async[bench]'" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "report").exists()


def test_figures_do_not_need_matplotlib(monkeypatch):
    without(monkeypatch, "matplotlib")

    assert invoke(*SMALL).exit_code == 0


def test_without_vllm_its_benchmark_says_what_it_needs(monkeypatch):
    without(monkeypatch, "vllm")

    result = invoke("scheduler")

    assert result.exit_code == 2
    assert "needs vllm, which is not installed: pip install 'lmcache-async[vllm]'" in result.stderr


def test_without_vllm_all_leaves_its_benchmark_out(monkeypatch):
    without(monkeypatch, "vllm")

    assert "scheduler" not in [benchmark.name for benchmark in table.find("all")]


def test_without_a_gpu_its_benchmark_says_what_it_needs_and_all_leaves_it_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    result = invoke("gpu", "--quick")

    assert result.exit_code == 2
    assert "the benchmark gpu needs a CUDA device" in result.stderr
    assert "gpu" not in [benchmark.name for benchmark in table.find("all")]
    assert "left out, for want of a CUDA device: gpu" in table.left_out()


def test_with_a_gpu_its_benchmark_runs(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    assert "gpu" in [benchmark.name for benchmark in table.find("all")]
    assert table.find("gpu")[0].load().QUICK.layers == 2


@pytest.mark.parametrize("entry", [invoke, lambda *words: command.main(words)])
def test_all_says_what_it_leaves_out(entry, monkeypatch, capsys):
    hash_alone = tuple(benchmark for benchmark in table.BENCHMARKS if benchmark.name == "hash")
    absent = table.Benchmark("absent", "nothing", "no_such_package")
    monkeypatch.setattr(table, "BENCHMARKS", (*hash_alone, absent))

    result = entry("all", "--quick", "--rounds", "1")

    told = capsys.readouterr().err if result == 0 else result.stderr
    assert "left out, for want of no_such_package: absent" in told


@pytest.mark.parametrize("rows", [[], [Row.of("it", "ms", [1.0], "limit", [2.0], {"of": 1})]])
def test_what_a_benchmark_left_out_is_told_with_its_figures(rows, tmp_path):
    async def measure(settings, frame):
        for row in rows:
            yield row
        frame.leave_out("a large one", "it does not fit")

    module = types.SimpleNamespace(run=measure)
    chosen = [((table.find("hash")[0], module), Settings())]
    request = runner.Request("hash", tmp_path / "figures.json", tmp_path / "report", rounds=1)

    [result] = runner._run(request, chosen, lambda *_: None)

    assert runner.lines(result)[-1] == "left out: a large one: it does not fit"
    written = json.loads((tmp_path / "figures.json").read_text())["benchmarks"]["hash"]
    assert written["left_out"] == ["a large one: it does not fit"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "left out: a large one: it does not fit" in page
    assert ("<img" in page) == (tmp_path / "report" / "hash.png").exists() == bool(rows)


def test_all_says_what_takes_minutes_and_is_left_out(monkeypatch):
    monkeypatch.setattr("lmcache_async.cli.bench.run", lambda *_: iter(()))

    assert "left out, since it takes minutes: serve" in invoke("all").stderr


def test_python_m_is_the_same(tmp_path, capsys):
    path = tmp_path / "figures.json"

    assert command.main([*SMALL, "--json", str(path)]) == 0
    assert list(json.loads(path.read_text())["benchmarks"]) == ["hash"]
    assert command.main(["hsh"]) == 2
    assert "did you mean 'hash'?" in capsys.readouterr().err


def test_the_files_of_the_first_benchmarks_are_commands_as_before(monkeypatch):
    from lmcache_async.bench import checksums, scheduler

    called = []
    for module in (checksums, scheduler):
        monkeypatch.setattr(module, "command", called.append)
        module.main(["--json", "x"])

    assert called == [["checksums", "--json", "x"], ["scheduler", "--json", "x"]]


@pytest.mark.parametrize("line", [x for block in SHELL.findall(PAGE.read_text()) for x in block.splitlines()])
def test_a_command_of_the_page_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"]:
        assert words[2] in {"lmcache-async[bench]", "lmcache-async[cli]"}
        return
    # In small, whatever the page says.
    if words[:2] == ["lmcache-async", "bench"]:
        result = invoke(*words[2:], "--quick", "--rounds", "1")
        runs = table.find(words[2])[0].available
        assert result.exit_code == (0 if runs else 2), result.output
    else:
        assert words[:3] == ["python", "-m", "lmcache_async.bench"]
        assert command.main([*words[3:], "--quick", "--rounds", "1"]) == 0


def test_the_page_names_every_benchmark_and_every_option():
    text = PAGE.read_text()

    for benchmark in table.BENCHMARKS:
        assert f"## `{benchmark.name}`" in text
        section = text.partition(f"## `{benchmark.name}`")[2].partition("\n## ")[0]
        module = importlib.import_module(f"lmcache_async.bench.{benchmark.name}")
        for field in dataclasses.fields(module.Settings):
            if "help" in field.metadata:
                flag = "--" + field.name.replace("_", "-")
                assert f"| `{flag}` | {field.default} |".replace("  ", " ") in section, (benchmark.name, flag)
