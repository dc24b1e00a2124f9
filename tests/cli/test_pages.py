"""docs/cli.md, docs/config.md and docs/compatibility.md are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcache_async.cli.app import load_commands
from lmcache_async.cli.checks import MATRIX, PYTHON, UVLOOP, minor
from tools import cli_page, config_page

ROOT = Path(__file__).parents[2]


COMMANDS = {tuple(name.split()): command for name, command in load_commands().items()}


def test_the_page_of_commands_is_up_to_date():
    text = cli_page.PAGE.read_text(encoding="utf-8")

    assert text == cli_page.page(text), "run: python -m tools.cli_page"


def test_the_page_of_the_configuration_is_up_to_date():
    text = config_page.PAGE.read_text(encoding="utf-8")

    assert text == config_page.page(text), "run: python -m tools.config_page"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_refuses_unknown_options(invoke, path):
    assert COMMANDS[path].help

    result = invoke(*path, "--no-such-option")

    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_page_of_versions_has_the_tested_versions():
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d[\d.]+) \| (\d[\d.]+) \|", text, re.MULTILINE)

    assert rows == list(MATRIX)
    assert f"| Python | {', '.join(PYTHON)} |" in text
    assert f"| uvloop | {', '.join(UVLOOP)} |" in text


def test_the_installed_versions_are_tested_ones():
    pins = {
        name: version
        for file in ("torch-cpu.txt", "vllm-cpu.txt", "package.txt")
        for name, version in re.findall(
            r"^([\w-]+)==(\S+)$", (ROOT / "requirements" / file).read_text(encoding="utf-8"), re.MULTILINE
        )
    }

    assert (pins["vllm-cpu"], pins["torch"]) == MATRIX[0]
    assert minor(pins["uvloop"]) in UVLOOP
    assert len({minor(vllm) for vllm, _ in MATRIX}) >= 3
