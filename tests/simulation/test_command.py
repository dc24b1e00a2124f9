"""`python -m tools.simulate`."""

import json

import pytest
from typer.testing import CliRunner

from tests.simulation.loop import Hang
from tools.simulate import app, watch


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_simulate_prints_a_line_for_each_seed_and_writes_json(tmp_path):
    path = tmp_path / "reports.json"

    result = invoke("--seed", "4", "--seeds", "2", "--steps", "30", "--json", str(path))

    assert result.exit_code == 0, result.output
    assert [line.split(";")[0] for line in result.stdout.splitlines()] == ["seed 4: ok", "seed 5: ok"]
    reports = json.loads(path.read_text())
    assert [report["seed"] for report in reports] == [4, 5]
    assert all(report["digest"] in result.stdout and report["made"] >= 30 for report in reports)
    assert reports[0]["command"] == "python -m tools.simulate --seed 4 --steps 30 --faults some"


def test_a_violation_ends_with_1_and_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr("lmcache_async.pipeline.batch.Scope.close", lambda self: None)

    result = invoke("--seed", "4", "--steps", "100", "--faults", "none")

    assert result.exit_code == 1
    assert "seed 4: VIOLATION at step" in result.stdout
    assert "nothing is under way, but slabs leased" in result.stderr
    assert "  python -m tools.simulate --seed 4 --steps 100 --faults none\n" in result.stderr


def test_the_watchdog_ends_blocked_runs():
    def block():
        with watch(0.01):
            while True:  # block until the watchdog ends it
                pass

    with pytest.raises(Hang, match=r"no progress in 0\.01 real seconds"):
        block()
