"""Modules that the command imports: no torch where it needs no tensor."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import lmcache_async
from lmcache_async.cli.app import COMMANDS, load_commands

# Each call is made in one process; after each, the modules that must not be there are looked for.
SCRIPT = """
import json, os, sys
from lmcache_async.cli.app import app

found = []
for arguments, env, unwanted in json.loads(sys.argv[1]):
    os.environ.update(env)
    sys.stdout = open(os.devnull, "w")
    try:
        app(arguments, prog_name="lmcache-async")
    except SystemExit as end:
        code = end.code
    sys.stdout = sys.__stdout__
    for name in env:
        del os.environ[name]
    found.append((arguments, code or 0, [name for name in unwanted if name in sys.modules]))
print(json.dumps(found))
"""
HEAVY = ["torch", "vllm", "transformers"]


def complete(*words: str) -> dict[str, str]:
    line = " ".join(["lmcache-async", *words])
    return {"_LMCACHE_ASYNC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}


def run(*calls: tuple[list[str], dict[str, str], list[str]]) -> list[list[object]]:
    """Return arguments, exit code and unwanted modules of each call: arguments, environment, unwanted modules."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
        env={name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_listing_the_commands_imports_none_and_help_and_commands_without_an_engine_no_torch(tmp_path):
    light = [*HEAVY, "numpy", "lmcache_async.config"]
    file = tmp_path / "kv.yaml"
    file.write_text(f"tiers: [cpu, {{name: disk, path: {tmp_path}, max_bytes: 1GiB}}]\n")
    calls = [(["--version"], {}, light), (["--help"], {}, light), ([], complete("co"), light)]
    calls += [([*name.split(), "--help"], {}, HEAVY) for name in load_commands()]
    calls += [([], complete(*name.split(), "--"), HEAVY) for name in load_commands()]
    calls += [
        (["config", "check", str(file)], {}, HEAVY),
        (["config", "show", str(file)], {}, HEAVY),
        (["config", "schema"], {}, HEAVY),
        (["tiers"], {}, HEAVY),
        ([], complete("tiers", "d"), HEAVY),
    ]

    found = run(*calls)

    assert len(found) == len(calls)
    for arguments, code, unwanted in found:
        assert (arguments, code, unwanted) == (arguments, 0, [])


def test_the_list_shows_each_command_with_the_first_paragraph_of_its_help(invoke):
    loaded = load_commands()
    shown = invoke("--help").stdout.splitlines()

    assert invoke("--version").stdout == f"lmcache-async {version('lmcache-async')}\n"
    for name, summary in COMMANDS.items():
        assert any(line.split()[1:2] == [name] and summary[:40] in line for line in shown)
        if name in loaded:
            first, _, _ = loaded[name].help.partition("\n\n")
            assert summary == " ".join(first.split()), name


def test_an_unknown_command_is_refused_with_the_nearest(invoke):
    result = invoke("tierss")

    assert result.exit_code == 2
    assert "tiers" in result.stderr.replace("tierss", "")


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'CacheEngin'"):
        _ = lmcache_async.CacheEngin


def test_a_public_name_is_the_one_that_type_checkers_see():
    tree = ast.parse(Path(str(lmcache_async.__file__)).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    names = {}

    for node in ast.walk(checked):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.name] = getattr(import_module(str(node.module)), alias.name)
                assert alias.name in dir(lmcache_async)
                assert getattr(lmcache_async, alias.name) is names[alias.name]

    assert set(names) == set(lmcache_async.__all__)
