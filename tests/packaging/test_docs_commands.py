"""Commands and files in the docs: parsed by shells, JSON and TOML, with names that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tomllib
from typing import Any

import pytest

from lmcache_async.cli.app import COMMANDS
from lmcache_async.config import load_config
from lmcache_async.integration.vllm.plugin import NAME
from lmcache_async.registry import LAYERS, STAGES, TIERS
from tests.packaging.test_docs import PAGES, ROOT, Block, blocks

SHELL = blocks("bash")
OURS = ("lmcache_async", "tools", "examples", "tests")
TRANSFER = re.compile(r"--kv-transfer-config(?:=|\s+)'(\{.*?\})'", re.DOTALL)


def check_transfer(config: dict[str, Any]) -> None:
    assert config["kv_connector"] == NAME
    assert config["kv_role"] in {"kv_both", "kv_producer", "kv_consumer"}
    load_config(env={}, extra=config.get("kv_connector_extra_config"))


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_reads_a_command(block: Block) -> None:
    ran = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False, timeout=250
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_files_named_by_commands_exist() -> None:
    text = "\n".join(block.text for block in SHELL)
    modules = {name for name in re.findall(r"python -m ([\w.]+)", text) if name.partition(".")[0] in OURS}
    files = set(re.findall(r"(?:-r|-c) (requirements/\S+)", text))

    assert "tools.release" in modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_subcommand_in_the_docs_exists() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = set(re.findall(r"(?:^(?:\$ )?|`)lmcache-async ([a-z][\w-]*)", text, re.MULTILINE))

    assert {"serve", "bench", "doctor", "tiers", "config"} <= shown
    assert shown <= set(COMMANDS)


def test_every_extra_in_the_docs_exists() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    shown = {
        extra
        for block in SHELL
        for extras in re.findall(r"(?:lmcache-async|')?\.?\[([a-z0-9,-]+)\]'", block.text)
        for extra in extras.split(",")
    }

    assert {"vllm", "testing"} <= shown
    assert shown <= {*known, "test"}  # the example distributions have the extra `test`


def test_every_command_that_starts_vllm_names_a_connector_that_there_is() -> None:
    found = [json.loads(text) for block in SHELL for text in TRANSFER.findall(block.text)]

    assert len(found) > 3
    for config in found:
        check_transfer(config)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_valid_for_vllm(block: Block) -> None:
    content = json.loads(block.text)

    if "kv_connector" in content:
        check_transfer(content)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_names_groups_that_there_are(block: Block) -> None:
    groups = tomllib.loads(block.text).get("project", {}).get("entry-points", {})

    assert set(groups) <= {TIERS, STAGES, LAYERS}
