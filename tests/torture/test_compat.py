"""Rows of `python -m tools.compat`. The command itself installs vLLM and starts real engines for many minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.compat import __main__ as compat


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither import vLLM nor use a package index."""
    monkeypatch.setattr(compat, "_VERSIONS", "print('9.9.9 of vLLM')")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def run_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only file of tests to run."""
    path = tmp_path / "test_connector.py"
    monkeypatch.setattr(compat, "TESTS", {"unit": ["-p", "no:randomly", str(path)]})
    return path


def test_a_failed_test_makes_the_exit_status_1_and_its_output_is_shown(
    run_test: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test.write_text("def test_hits():\n    assert 3 == 4\n")

    status = compat.main(["here", "--folder", str(tmp_path / "new" / "folder")])

    output = capsys.readouterr()
    assert status == 1
    assert "1 failed" in output.out
    assert "assert 3 == 4" in output.err


def test_tests_that_exceed_the_time_limit_are_ended_and_the_next_version_runs(
    run_test: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test.write_text("import signal\ndef test_hangs():\n    signal.pause()\n")

    status = compat.main(["here", "here", "--folder", str(tmp_path), "--timeout-s", "0.1"])

    assert status == 1
    assert capsys.readouterr().out == "| here | 9.9.9 of vLLM | not finished in 0.1 s |\n" * 2


def test_a_row_has_the_versions_and_the_number_of_tests_also_after_a_version_that_is_not_in_the_index(
    run_test: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test.write_text(
        "import pytest\ndef test_one(): pass\ndef test_two(): pass\n@pytest.mark.gpu\ndef test_three(): pass\n"
    )

    status = compat.main(
        ["python:9.9.9", "here", "--folder", str(tmp_path), "--logs", str(tmp_path / "logs")]
    )

    missing, here = capsys.readouterr().out.splitlines()
    assert status == 1
    assert "not installed: ERROR: No matching distribution found for vllm==9.9.9" in missing
    assert here == "| here | 9.9.9 of vLLM | 2 passed, 1 deselected |"
    assert "2 passed" in (tmp_path / "logs" / "here-unit.txt").read_text()


def test_an_installation_that_exceeds_its_time_limit_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = compat.main(["python:9.9.9", "--folder", str(tmp_path), "--install-timeout-s", "0.01"])

    row = capsys.readouterr().out
    assert status == 1
    assert "not installed: `-m pip download" in row
    assert "vllm==9.9.9` took more than 0.01 s" in row


def test_a_version_that_cannot_be_imported_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "_VERSIONS", "import os; os.abort()")

    assert compat.main(["here", "--folder", str(tmp_path)]) == 1
    assert "cannot be imported: exit status -6" in capsys.readouterr().out
