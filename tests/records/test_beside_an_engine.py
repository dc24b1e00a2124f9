"""A directory that a running engine holds: looked at and copied all the same, changed by nobody else."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import uvloop

from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.rest import DiskAtRest
from lmcache_async.records.flight import Meter
from lmcache_async.records.opening import TargetSpec, open_target
from lmcache_async.records.target import Target
from lmcache_async.records.verifying import VerifyOptions, verify
from lmcache_async.types import ChunkKey
from tests.records.filled import content, filled, invoke, record_files, told


class OpenTier:
    """The disk tier, open on a loop and a thread of its own."""

    def __init__(self, root):
        self._config = DiskConfig(path=root, max_bytes=1 << 30)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self):
        self._thread.start()
        self.tier = self.call(self._open())
        return self

    def __exit__(self, *_):
        self.call(self.tier.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _open(self):
        return await DiskTier(self._config).__aenter__()


@pytest.fixture
def held(tmp_path):
    filled(tmp_path / "cache")
    with OpenTier(tmp_path / "cache") as opened:
        opened.root = tmp_path / "cache"
        yield opened


@pytest.mark.parametrize("command", ["inspect", "verify", "gc --dry-run"])
def test_it_is_read_beside_the_owner_who_is_named(held, command):
    name, *options = command.split()

    found = told(name, held.root, *options)

    assert found["held_by_process"] == str(os.getpid())


def test_it_is_copied_beside_the_owner(held, tmp_path):
    done = told("copy", held.root, tmp_path / "there")

    assert (done["records"], done["held_by_process"]) == (5, str(os.getpid()))


@pytest.mark.parametrize("command", ["verify --remove", "verify --quarantine", "gc", "gc --max-bytes 1B"])
def test_it_is_changed_by_its_owner_alone(held, command):
    before = content(held.root)
    name, *options = command.split()

    refused = invoke(name, held.root, *options)

    assert refused.exit_code == 3
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert content(held.root) == before


def test_nothing_is_copied_into_it(held, tmp_path):
    told("copy", held.root, tmp_path / "there")

    refused = invoke("copy", tmp_path / "there", held.root)

    assert refused.exit_code == 3
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert told("copy", tmp_path / "there", held.root, "--dry-run")["there"] == 5


def test_an_owner_that_has_ended_is_none(tmp_path):
    filled(tmp_path / "cache")

    assert told("inspect", tmp_path / "cache")["held_by_process"] is None


def test_looking_keeps_no_engine_out(tmp_path):
    filled(tmp_path / "cache")
    rest = DiskAtRest(DiskConfig(path=tmp_path / "cache", max_bytes=1))
    rest.look()
    try:
        with OpenTier(tmp_path / "cache"):
            assert rest.holder == str(os.getpid())
        assert rest.holder == ""
    finally:
        rest.close()


async def test_a_record_that_is_evicted_while_it_is_read_is_gone_and_not_wrong(tmp_path, monkeypatch):
    await asyncio.to_thread(filled, tmp_path / "cache")
    big = record_files(tmp_path / "cache")[0]
    real = DiskAtRest.read

    def read(self, key, view, offset=0):
        if key == ChunkKey(bytes.fromhex(big.name)):
            big.unlink(missing_ok=True)
        return real(self, key, view, offset)

    monkeypatch.setattr(DiskAtRest, "read", read)
    target: Target = open_target(TargetSpec(path=tmp_path / "cache"), change=False)

    async with target:
        report = await verify(target, VerifyOptions(), Meter())

    assert (report.gone, report.records, report.wrong) == (1, 4, {})


async def test_a_record_that_is_exchanged_while_it_is_read_is_not_wrong(root, monkeypatch):
    exchanged = ChunkKey(bytes.fromhex(record_files(root)[0].name))
    real = DiskAtRest.read
    times = []

    def read(self, key, view, offset=0):
        count = real(self, key, view, offset)
        if key == exchanged:
            times.append(offset)
            if len(times) == 1:  # a payload of the same tokens, computed anew
                view[4200] ^= 1
        return count

    monkeypatch.setattr(DiskAtRest, "read", read)

    async with open_target(TargetSpec(path=root), change=False) as target:
        report = await verify(target, VerifyOptions(), Meter())

    assert (report.records, report.wrong, len(times)) == (8, {}, 2)
