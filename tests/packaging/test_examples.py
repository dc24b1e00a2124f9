"""The examples without vLLM: the engine-only one runs, and each deployment's file creates its tiers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_async.daemon.config import DaemonConfig, load_daemon_config
from tests.packaging.deployments import EXAMPLES, checked, written
from tests.support import forked_python

DEPLOYMENTS = EXAMPLES / "deployments"
FILES = sorted(DEPLOYMENTS.glob("*.yaml"))
DAEMONS = [path for path in FILES if path.stem.endswith("-daemon")]
ENGINES = [path for path in FILES if path not in DAEMONS] + sorted(
    (EXAMPLES / "disaggregated").glob("*.yaml")
)


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_a_deployments_file_makes_its_tiers(path: Path, tmp_path: Path) -> None:
    assert checked(path.read_text(encoding="utf-8"), tmp_path).tiers


@pytest.mark.parametrize("path", DAEMONS, ids=lambda path: path.stem)
def test_a_daemons_file_loads_and_its_engines_connect_to_it(path: Path, tmp_path: Path) -> None:
    daemon = load_daemon_config(written(path.read_text(encoding="utf-8"), tmp_path), {})
    beside = path.with_name(path.name.replace("-daemon", "-engine"))
    engine = checked(beside.read_text(encoding="utf-8"), tmp_path)
    [host] = [tier for tier in engine.tiers if tier.name == "host"]

    assert isinstance(daemon, DaemonConfig)
    assert str(daemon.socket) == host.options["socket"]


def test_every_deployment_is_in_the_table() -> None:
    table = (DEPLOYMENTS / "README.md").read_text(encoding="utf-8")

    assert len(FILES) >= 8
    assert [path.name for path in FILES if f"`{path.name}`" not in table] == []


def run_without_vllm(example: str, directory: Path, *arguments: str) -> str:
    """Run an example in a process that cannot import vLLM, and return what it printed."""
    program = directory / "without_vllm.py"
    program.write_text(
        "import runpy, sys\n"
        "sys.modules['vllm'] = None\n"
        f"sys.argv = {[example, *arguments]!r}\n"
        f"runpy.run_path({example!r}, run_name='__main__')\n",
        encoding="utf-8",
    )

    ran = forked_python.run(str(program), cwd=EXAMPLES)

    assert ran.status == 0, ran.output
    return ran.output


def test_the_engine_runs_without_vllm(tmp_path: Path) -> None:
    output = run_without_vllm("engine_only.py", tmp_path)

    assert "stored 8 chunks" in output
    assert "loaded 2048 of 2051 tokens" in output


def test_transformers_loads_the_kv_that_it_stored(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--tokens", "64,300", "--json", str(results), "--path", str(tmp_path)]

    output = run_without_vllm("transformers_generate.py", tmp_path, *arguments)

    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    assert [row["tokens"] for row in rows] == [64, 304]
    assert all(row["kv_equal"] and row["bus_s"] > 0 and row["read_s"] > 0 for row in rows)
    assert "passed: loaded KV is bit-equal" in output
