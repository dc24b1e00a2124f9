"""Shell completion, requested the way shells do."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lmcache_async.cli.app import app
from lmcache_async.registry import TIERS, Registry

SHELLS = {
    "bash": lambda words: {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": " ".join(words)},
    "fish": lambda words: {
        "_TYPER_COMPLETE_ARGS": " ".join(words),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}


def ask(shell: str, *words: str) -> str:
    """Request completions like a shell: through variables, without arguments."""
    env = {"_LMCACHE_ASYNC_COMPLETE": f"complete_{shell}", **SHELLS[shell](["lmcache-async", *words])}
    result = CliRunner().invoke(app, [], prog_name="lmcache-async", env=env)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_tiers_are_completed(shell):
    answer = ask(shell, "tiers", "d")

    assert "disk" in answer
    assert "valkey" not in answer


def test_commands_benchmarks_and_all_tiers_are_completed():
    assert set(ask("bash", "bench", "").split()) == {"memory", "disk", "tier"}
    assert "valkey" in ask("bash", "bench", "tier", "val").split()
    assert {"bench", "config", "doctor", "serve", "tiers"} <= set(ask("bash", "").split())
    assert set(Registry().available(TIERS)) <= set(ask("bash", "tiers", "").split())


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell):
    env = {"_LMCACHE_ASYNC_COMPLETE": f"source_{shell}"}
    result = CliRunner().invoke(app, [], prog_name="lmcache-async", env=env)

    assert result.exit_code == 0, result.output
    assert "_LMCACHE_ASYNC_COMPLETE" in result.stdout
    assert "lmcache-async" in result.stdout
