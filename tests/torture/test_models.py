"""Arguments and table of `python -m tools.models`. The campaign itself starts real engines for half an hour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_driver import CHUNK
from tools.models import __main__ as main
from tools.models.campaign import EVERY_FAMILY, MODES, DoesNotRunError
from tools.models.families import FAMILIES
from tools.models.questions import STEP, Questions, lengths


class FakeCampaign:
    """A campaign without engines."""

    def __init__(self, engines: object, family: Any, directory: Path) -> None:
        self.family = family


class FakeEngines:
    def __init__(self, directory: Path) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def modes(monkeypatch):
    """Replace all modes by one that compares three answers."""

    def three_answers(campaign: Any, outcome: Any) -> None:
        outcome.add("answers", 3)

    found = dict.fromkeys(MODES, three_answers)
    monkeypatch.setattr(main, "MODES", found)
    monkeypatch.setattr(main, "Campaign", FakeCampaign)
    monkeypatch.setattr(main, "Engines", FakeEngines)
    return found


def test_the_table_has_a_row_for_each_family(modes, tmp_path, capsys):
    status = main.main(["--folder", str(tmp_path), "--only", "llama", "--only", "qwen3-next"])

    header, _, llama, states = capsys.readouterr().out.splitlines()
    columns = len(main.modes_of(FAMILIES["llama"]))
    assert status == 0
    assert [header.count("|"), llama.count("|"), states.count("|")] == [columns + 3] * 3
    assert llama.count("equal (3)") == columns
    assert "vLLM keeps no states then" in states
    assert llama in (tmp_path / "models.md").read_text()
    assert set(json.loads((tmp_path / "models.json").read_text())["results"]) == {"llama", "qwen3-next"}


def test_a_problem_makes_the_exit_status_1(modes, tmp_path, capsys):
    modes["preemption"] = lambda campaign, outcome: outcome.problem("a wrong answer")
    modes["two ranks"] = lambda campaign, outcome: 1 / 0

    status = main.main(["--folder", str(tmp_path), "--only", "qwen3"])

    row = capsys.readouterr().out.splitlines()[-1]
    assert status == 1
    assert row.count("1 problem") == 2


def test_a_family_that_plain_vllm_does_not_run_is_no_problem(modes, tmp_path, capsys):
    def does_not_run(campaign: Any, outcome: Any) -> None:
        raise DoesNotRunError("no kernel")

    modes["two ranks"] = does_not_run

    assert main.main(["--folder", str(tmp_path), "--only", "qwen3", "--mode", "two ranks"]) == 0
    assert "not in plain vLLM: no kernel" in capsys.readouterr().out


def test_unknown_families_are_refused(capsys):
    with pytest.raises(SystemExit):
        main.main(["--only", "llama-9"])
    assert "llama-9" in capsys.readouterr().err


def test_families_are_listed_with_their_modes(capsys):
    assert main.main(["--list"]) == 0

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == set(FAMILIES)
    assert all(mode in lines["llama"] for mode in EVERY_FAMILY)
    assert "no prefix caching" not in lines["qwen3-next"]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_end_around_the_boundaries(name):
    family = FAMILIES[name]
    found = lengths(family)

    boundaries = {3 * family.block, 5 * CHUNK, STEP, family.window, 2 * family.window} - {0}
    around = {boundary + more for boundary in boundaries for more in (-1, 0, 1)}
    assert {length for length in around if length >= min(found)} <= set(found)
    assert max(around) > min(found)
    assert len(Questions(family).around_boundaries("a")) == len(found)
