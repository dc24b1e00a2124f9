"""`lmcache-async simulate`."""

import builtins
import json
import sys

import pytest
from typer.testing import CliRunner

from lmcache_async.cli import main as command
from lmcache_async.cli.app import app
from lmcache_async.cli.simulate import _watchdog
from lmcache_async.testing.simulation import Hang


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_simulate_tells_each_seed_in_a_line_and_writes_json(tmp_path):
    path = tmp_path / "reports.json"

    result = invoke("simulate", "--seed", "4", "--seeds", "2", "--steps", "30", "--json", str(path))

    assert result.exit_code == 0, result.output
    assert [line.split(";")[0] for line in result.stdout.splitlines()] == ["seed 4: ok", "seed 5: ok"]
    reports = json.loads(path.read_text())
    assert [report["seed"] for report in reports] == [4, 5]
    assert all(report["digest"] in result.stdout and report["made"] >= 30 for report in reports)
    assert reports[0]["command"] == "lmcache-async simulate --seed 4 --steps 30 --faults some"


def test_a_violation_ends_with_1_and_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr("lmcache_async.pipeline.batch.Scope.close", lambda self: None)

    result = invoke("simulate", "--seed", "4", "--steps", "100", "--faults", "none")

    assert result.exit_code == 1
    assert "seed 4: VIOLATION at step" in result.stdout
    assert "nothing is under way, but slabs leased" in result.stderr
    assert "  lmcache-async simulate --seed 4 --steps 100 --faults none\n" in result.stderr


@pytest.mark.parametrize("arguments", [["--faults", "lots"], ["--steps", "0"], ["--seed", "one"]])
def test_a_wrong_option_ends_with_2(arguments):
    assert invoke("simulate", *arguments).exit_code == 2


def test_without_typer_the_command_names_the_extra(monkeypatch, capsys):
    import_ = builtins.__import__

    def without_typer(name, *arguments, **options):
        if name.partition(".")[0] == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return import_(name, *arguments, **options)

    for name in ("lmcache_async.cli.app", "lmcache_async.cli.simulate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without_typer)

    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "pip install 'lmcache-async[cli]'" in capsys.readouterr().err


def test_another_missing_package_is_no_matter_of_the_extra(monkeypatch):
    import_ = builtins.__import__

    def without_torch(name, *arguments, **options):
        if name == "lmcache_async.cli.app":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return import_(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)

    with pytest.raises(ModuleNotFoundError, match="torch"):
        command.main()


def test_the_watchdog_ends_what_blocks():
    def block():
        with _watchdog(0.01):
            while True:  # what it is for
                pass

    with pytest.raises(Hang, match=r"no progress in 0\.01 real seconds"):
        block()
