"""Each benchmark, in small: it runs, and what it writes has its form."""

from __future__ import annotations

import json
import math

import pytest

from lmcache_async.bench.command import main
from lmcache_async.bench.table import BENCHMARKS, find

NAMES = [benchmark.name for benchmark in BENCHMARKS if benchmark.available]
RUNS = [pytest.param(name, marks=pytest.mark.vllm) if name == "serve" else name for name in NAMES]

WHAT = {
    "hash": {"xxh3_128, int32 array, whole", "blake3, int64 array, in steps", "sha256, list, whole"},
    "lookup": {"engine, keys", "engine, keys, pinned", "scheduler half, hashed before"},
    "arena": {"store, 1 thread", "retrieve, 1 thread", "store, 2 threads", "retrieve, 2 threads"},
    "disk": {"store, records of 1 MiB", "retrieve, records of 1 MiB"},
    "loop": {"store, 64 chunks in batches of 16", "retrieve, 8 chunks in batches of 1"},
    "scheduler": {"request: hit", "request: miss, with its stores", "call: on_new_request"},
    "valkey": {"put, records of 1 MiB", "get, records of 1 MiB"},
    "s3": {"put, records of 1 MiB", "get, records of 1 MiB", "get, records of 2 MiB"},
    "mooncake": {"put, records of 1 MiB", "get, records of 1 MiB"},
    "host": {
        "put, 2 records of 1 MiB",
        "get and read, 2 records of 1 MiB",
        "lease and release, 2 records of 1 MiB",
    },
    "checksums": {"store", "load"},
    "peers": {"hash, list"},
    "gpu": {"llama-8b, bf16, fused: D2H, 1 chunk", "product beside H2D, priority high"},
    "serve": {"new prompt", "known prompt", "new prompts at once", "mixed load, p95 between tokens"},
}

LIMITS = {
    "hash": {"bare xxh3_128, chunk by chunk", "bare sha256, chunk by chunk", "np.array(list, int32)"},
    "lookup": {"one dict lookup a key", "echo through a unix socket"},
    "arena": {"memcpy of the same rows", "memcpy layer by layer"},
    "disk": {"pwrite", "pread"},
    "loop": {"one asyncio.sleep(0)", "one thread hop", "one a batch"},
    "scheduler": {"array('i', tokens)"},
    "valkey": {"bare sockets", "redis-py"},
    "s3": {"bare HTTP", "obstore"},
    "mooncake": {"Mooncake's client", "Mooncake's client, one call"},
    "host": {"memcpy, 1 thread", "memcpy, 2 threads", "thread hop"},
    "checksums": {"without"},
    "peers": set(),
    "gpu": {"memcpy, same pieces", "memcpy, one piece", "product alone"},
    "serve": {"no connector", "own hit", "own hit, same process"},
}


@pytest.fixture(scope="module", params=RUNS)
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Name and JSON of a quick run."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    assert main([request.param, "--quick", "--rounds", "1", "--json", str(path)]) == 0
    return request.param, json.loads(path.read_text())


def test_a_quick_run_writes_every_figure_beside_its_limit(figures):
    name, whole = figures
    rows = whole["benchmarks"][name]["rows"]

    assert whole["quick"]
    assert whole["rounds"] == 1
    assert {row["name"] for row in rows} >= WHAT[name]
    assert {row["limit_name"] for row in rows} >= LIMITS[name]
    for row in rows:
        for figure in ("value", "limit_value", "ratio"):
            assert 0 < row[figure] < math.inf, row
        assert row["better"] == ("more" if row["unit"].endswith("/s") else "less")
        assert row["parameters"]
        assert len(row["ratios"]) == (0 if name == "scheduler" else 1)


def test_figures_come_with_the_machine(figures):
    _, whole = figures

    assert {"date", "cores", "cpu", "memory_gib", "kernel", "python", "torch", "numpy"} <= set(
        whole["machine"]
    )


def test_the_table_of_expectations_is_complete():
    assert set(WHAT) == set(LIMITS) == {benchmark.name for benchmark in BENCHMARKS}


def test_the_scheduler_bench_goes_through_hits_and_misses(tmp_path, capsys):
    path = tmp_path / "scheduler.json"

    code = main(["scheduler", "--requests", "6", "--tokens", "2048", "--json", str(path)])

    result = json.loads(path.read_text())["benchmarks"]["scheduler"]
    rows = {row["name"]: row for row in result["rows"]}
    assert code == 0
    assert (
        rows["request: hit"]["more"]["count"] == rows["request: miss, with its stores"]["more"]["count"] == 3
    )
    assert rows["request: all"]["more"]["p99_ms"] >= rows["request: all"]["value"] > 0
    assert result["settings"] == {"requests": 6, "tokens": 2048, "block_size": 16}
    assert "array('i', tokens)" in capsys.readouterr().out


def test_all_is_every_benchmark_that_can_run_here_but_those_of_minutes():
    assert [benchmark.name for benchmark in find("all")] == [name for name in NAMES if name != "serve"]


@pytest.mark.parametrize("name", NAMES)
def test_each_has_settings_for_a_quick_run(name):
    module = find(name)[0].load()

    assert isinstance(module.QUICK, module.Settings)
