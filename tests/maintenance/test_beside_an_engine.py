"""Commands on a directory that a running engine holds: reading works, changes are refused."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import uvloop

from lmcache_async.maintenance.concurrency import Meter
from lmcache_async.maintenance.stores import StoreSpec, open_store
from lmcache_async.maintenance.verification import verify
from lmcache_async.memory.record import PIECE_BYTES
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.tiers.offline import StoredRecord
from lmcache_async.types import ChunkKey
from tests.maintenance.filled import content, filled, invoke, record_files, told


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
def test_reading_works_beside_an_engine_and_names_its_process(held, command):
    name, *options = command.split()

    found = told(name, held.root, *options)

    assert found["held_by_process"] == str(os.getpid())


def test_copying_from_it_works_beside_an_engine(held, tmp_path):
    done = told("copy", held.root, tmp_path / "there")

    assert (done["records"], done["held_by_process"]) == (5, str(os.getpid()))


@pytest.mark.parametrize("command", ["verify --remove", "verify --quarantine", "gc", "gc --max-bytes 1B"])
def test_changing_it_beside_an_engine_is_refused(held, command):
    before = content(held.root)
    name, *options = command.split()

    refused = invoke(name, held.root, *options)

    assert refused.exit_code == 3
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert content(held.root) == before


def test_copying_into_it_is_refused(held, tmp_path):
    told("copy", held.root, tmp_path / "there")

    refused = invoke("copy", tmp_path / "there", held.root)

    assert refused.exit_code == 3
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert told("copy", tmp_path / "there", held.root, "--dry-run")["there"] == 5


def test_a_process_that_has_ended_does_not_hold_the_directory(tmp_path):
    filled(tmp_path / "cache")

    assert told("inspect", tmp_path / "cache")["held_by_process"] is None


async def test_reading_does_not_lock_the_directory(root):
    async with open_store(StoreSpec(path=root), change=False) as store:
        with OpenTier(root):
            async with open_store(StoreSpec(path=root), change=False) as other:
                assert other.holder == str(os.getpid())
        assert store.holder == ""
        assert len(await store.list()) == 8


class AtBegin(Meter):
    """Calls a function once the records are listed."""

    def __init__(self, call):
        self._call = call

    def begin(self, what, count):
        self._call()


async def test_a_record_that_is_deleted_after_it_was_listed_is_gone_and_not_damaged(root):
    newest = record_files(root)[0]

    async with open_store(StoreSpec(path=root), change=False) as store:
        report = await verify(store, AtBegin(newest.unlink))

    assert (report.gone, report.records, report.wrong) == (1, 7, {})


async def test_a_record_that_is_deleted_while_it_is_read_is_read_to_its_end(root):
    file = record_files(root)[0]
    expected = os.urandom(PIECE_BYTES + 8192)
    file.write_bytes(expected)

    def visit(pieces):
        read = bytes(next(pieces))
        file.unlink()
        return [read, *map(bytes, pieces)]

    async with open_store(StoreSpec(path=root), change=False) as store:
        pieces = await store.examine(StoredRecord(ChunkKey(bytes.fromhex(file.name)), len(expected)), visit)

    assert [len(piece) for piece in pieces] == [PIECE_BYTES, 8192]
    assert b"".join(pieces) == expected
