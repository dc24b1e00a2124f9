"""The commands of docs/records.md run in order and exit with 0; the exit codes of docs/cli.md are up to date."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from lmcache_async.cli import output
from lmcache_async.cli.app import load_commands
from tests.maintenance.filled import TOKENS, filled, invoke, rig_of
from tests.support.valkey_servers import running

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "records.md").read_text(encoding="utf-8")
COMMANDS = ("inspect", "verify", "gc", "copy", "warm")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(tmp_path / "cache", rig=rig_of("model-a"))
    filled(tmp_path / "cache", TOKENS[:16], rig=rig_of("model-b"))
    Path("prompts.jsonl").write_text(json.dumps(TOKENS) + "\n")
    Path("requests.jsonl").write_text(json.dumps({"prompt_token_ids": TOKENS}) + "\n")
    with running() as server:
        places = {
            "/var/cache/lmcache-async": str(tmp_path / "cache"),
            "/mnt/backup": str(tmp_path / "backup"),
            "valkey://localhost:6379": server.url,
        }

        def here(text):
            for place, real in places.items():
                text = text.replace(place, real)
            return text

        Path("engine.yaml").write_text(here(blocks("yaml")[0]))
        lines = [here(line) for block in blocks("bash") for line in block.splitlines()]
        ran = []
        for line in lines:
            program, *arguments = shlex.split(line)
            assert program == "lmcache-async"
            result = invoke(*arguments)
            assert result.exit_code == 0, f"{line}\n{result.output}"
            ran.append(arguments[0])

    assert set(ran) == set(COMMANDS)
    assert len(ran) >= 15


def test_every_option_of_the_page_exists():
    commands = load_commands()
    known = {
        option
        for name in COMMANDS
        for each in commands[name].params
        for option in each.opts + each.secondary_opts
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))

    assert named - known == {"--enable-prompt-tokens-details"}  # an option of vLLM


def test_the_exit_codes_are_documented():
    table = (DOCS / "cli.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}

    assert listed == {output.PASSED, output.PROBLEM, output.USAGE, output.IN_USE, output.STOPPED}
