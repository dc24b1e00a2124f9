"""The whole serve benchmark with fake vLLM processes."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest

from lmcache_async.bench.measure import Frame
from lmcache_async.errors import ConfigError
from tools.benchmarks import serve, serve_engine, serve_files
from tools.benchmarks.serve import QUICK
from tools.benchmarks.serve_engine import ServeError

FAKE = Path(__file__).parent / "serve_fake.py"
EVERYTHING = dataclasses.replace(QUICK, parts="alone,disk,slow,load")
OURS = "LMCacheAsyncConnector"


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    monkeypatch.setattr(serve_engine, "COMMAND", (sys.executable, str(FAKE)))
    monkeypatch.setattr(serve_files, "STILL_S", 0.0)


def measured(settings=EVERYTHING, **options):
    frame = Frame(rounds=2, quick=True, chosen=random.Random(0), **options)
    return {(row.name, row.limit_name): row for row in serve.measure(settings, frame)}


def test_every_part_gives_its_figures_beside_their_limits():
    rows = measured()

    ratios = {key: round(row.ratio, 6) for key, row in rows.items() if " read" not in key[1]}
    assert ratios == {
        ("new prompt", "no connector"): 1,
        ("known prompt", "own hit"): 2,
        ("known prompt", "own hit, same process"): 2,
        ("new prompt, disk tier", "no connector"): 1,
        ("known prompt, disk tier", "own hit"): 2,
        ("known prompt, disk tier", "own hit, same process"): 2,
        ("known prompt, after a restart", "own hit"): 2,
        ("known prompt, after a restart", "no connector"): round(2e-3 / 514e-4, 6),
        ("slow tier", "no connector"): 1,
        ("new prompts at once", "no connector"): 1,
        ("mixed load, p95 between tokens", "no connector"): 1,
        ("mixed load", "no connector"): ratios["mixed load", "no connector"],
    }
    assert rows["slow tier", "no connector"].more == {"loaded_tokens": 0}
    reading = rows["known prompt, disk tier", "O_DIRECT read of the same files"].limit_value
    assert reading > 0
    assert rows["known prompt, disk tier", "that read, then the own hit"].limit_value == pytest.approx(
        reading + 1
    )
    assert rows["new prompt", "no connector"].value == pytest.approx(51.4)
    assert len(rows["new prompt", "no connector"].ratios) == 2


@pytest.mark.parametrize("parts", ["alone", "disk", "slow", "load", "alone,load", EVERYTHING.parts])
def test_progress_is_reported_to_the_end(parts):
    told = []

    measured(dataclasses.replace(QUICK, parts=parts), progress=lambda done, total: told.append((done, total)))

    assert [done for done, _ in told] == list(range(told[-1][1] + 1))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("wrong", "the answer differs from that without a connector"),
        ("misses", "0 tokens came from a cache, expected 512 to 513"),
        ("dead", "the vLLM 'lmcache-async' ended: no such device\nThe end of its log:\nno such device"),
        ("full at restart", "lmcache-async, disk, restarted kept no file of a new prompt"),
        ("dies", "ended: MemoryError: out of memory\nThe end of its log:"),
    ],
)
def test_a_wrong_answer_or_miss_ends_the_run(monkeypatch, fault, told):
    monkeypatch.setenv("FAKE_FAULT", f"{OURS}:{fault}")

    with pytest.raises(ServeError, match="lmcache-async") as error:
        measured()

    assert told in str(error.value)


def test_peers_are_measured_beside_ours():
    rows = measured(dataclasses.replace(QUICK, connectors="ExampleConnector"))

    row = rows["known prompt, ExampleConnector", "own hit"]
    assert row.parameters["connector"] == "ExampleConnector"
    assert row.ratio == pytest.approx(2)
    assert ("known prompt", "own hit") in rows
    assert rows["known prompt", "ExampleConnector"].ratio == pytest.approx(1)
    assert ("mixed load, ExampleConnector", "no connector") in rows


def test_a_peer_with_a_disk_is_measured_from_the_disk(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("FAKE_FAULT", "LMCacheConnectorV1:needs stand_ins")
    dropped = []
    drop = serve_files.drop
    monkeypatch.setattr(serve_files, "drop", lambda paths: (dropped.extend(paths), drop(paths)))
    peers = "LMCacheConnectorV1@stand_ins, LMCacheConnectorV1/disk@stand_ins"

    rows = measured(dataclasses.replace(QUICK, parts="alone,disk", connectors=peers))

    ours = [limit for name, limit in rows if name == "known prompt"]
    assert sorted(ours) == ["LMCacheConnectorV1", "own hit", "own hit, same process"]
    assert rows["known prompt, disk tier", "LMCacheConnectorV1/disk"].ratio == pytest.approx(1)
    assert rows["known prompt, LMCacheConnectorV1/disk", "that read, then the own hit"].ratio > 0
    assert {"LMCacheConnectorV1-disk", "disk"} <= {path.parent.name for path in dropped}


def test_a_vllm_without_connector_can_be_measured_beside_itself():
    rows = measured(dataclasses.replace(QUICK, connectors="NoConnector"))

    assert rows["new prompt, NoConnector", "no connector"].ratio == pytest.approx(1)
    assert rows["mixed load, p95 between tokens, NoConnector", "no connector"].ratio == pytest.approx(1)
    assert ("known prompt", "NoConnector") not in rows


@pytest.mark.parametrize("fault", ["dead", "dies", "wrong", "misses"])
def test_a_peer_that_fails_is_left_out_with_the_reason(monkeypatch, caplog, fault):
    monkeypatch.setenv("FAKE_FAULT", f"OffloadingConnector:{fault}")

    rows = measured(dataclasses.replace(EVERYTHING, connectors="OffloadingConnector, ExampleConnector"))

    names = {row.parameters["connector"] for row in rows.values()}
    assert "OffloadingConnector is left out: " in caplog.text
    assert "OffloadingConnector" not in names
    assert {"lmcache-async", "ExampleConnector"} <= names


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    measured(dataclasses.replace(QUICK, parts="load", connectors="LMCacheConnectorV1"))

    assert "LMCacheConnectorV1 is left out: the package lmcache is not installed" in caplog.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"parts": "alone,dsk"},
            "there is no part 'dsk'; did you mean 'disk'? there are: alone, disk, slow, load",
        ),
        ({"connectors": "Example"}, "there is no connector 'Example'; did you mean 'ExampleConnector'?"),
    ],
)
def test_a_wrong_name_is_an_error_before_anything_starts(monkeypatch, options, told):
    monkeypatch.setattr(serve_engine, "COMMAND", ("/nowhere",))

    with pytest.raises(ConfigError) as error:
        measured(dataclasses.replace(EVERYTHING, **options))

    assert told in str(error.value)


def test_no_process_is_left_when_the_run_ends_early(monkeypatch):
    started = []
    start = serve_engine.Engine.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        started.append(self._process)

    monkeypatch.setattr(serve_engine.Engine, "__init__", noted)
    monkeypatch.setenv("FAKE_FAULT", f"{OURS}:dies")
    with pytest.raises(ServeError):
        list(serve.measure(EVERYTHING, Frame(rounds=1, quick=True)))

    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
