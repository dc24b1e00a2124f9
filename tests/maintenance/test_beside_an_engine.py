"""Commands on a directory that a running engine holds: reading works, changes are refused."""

from __future__ import annotations

import contextlib
import os

import pytest

from lmcache_async.engine.loop import LoopThread
from lmcache_async.maintenance.stores import Stores
from lmcache_async.maintenance.verification import verify
from lmcache_async.memory.record import PIECE_BYTES
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.tiers.offline import StoredRecord
from lmcache_async.types import ChunkKey
from tests.maintenance.filled import content, invoke, record_files, told


@contextlib.contextmanager
def opened(root):
    """The disk tier, open on its own loop and thread."""
    thread = LoopThread("test-tier")
    tier = DiskTier(DiskConfig(path=root, max_bytes=1 << 30))
    thread.submit(tier.__aenter__()).result(60)
    try:
        yield
    finally:
        thread.submit(tier.__aexit__(None, None, None)).result(60)
        thread.close()


@pytest.fixture
def held(root):
    """A directory held by a tier in this process."""
    with opened(root):
        yield root


@pytest.mark.parametrize("command", ["inspect", "verify", "gc --dry-run", "copy"])
def test_reading_works_beside_an_engine_and_names_its_process(held, command, tmp_path):
    name, *options = command.split()

    found = told(name, held, *options, *([tmp_path / "there"] if name == "copy" else []))

    assert found["held_by_process"] == str(os.getpid())


@pytest.mark.parametrize(
    "command",
    ["verify {} --remove", "verify {} --quarantine", "gc {}", "gc {} --max-bytes 1B", "copy {there} {}"],
)
def test_changing_it_beside_an_engine_is_refused(held, command, tmp_path):
    there = tmp_path / "there"
    assert told("copy", held, there)["records"] == 8
    assert told("copy", there, held, "--dry-run")["there"] == 8
    before = content(held)

    refused = invoke(*command.format(held, there=there).split())

    assert refused.exit_code == 3
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert content(held) == before


async def test_reading_does_not_lock_the_directory(root):
    """A process that has ended does not hold it either."""
    async with Stores().open(root) as store:
        with opened(root):
            async with Stores().open(root) as other:
                assert other.holder == str(os.getpid())
        assert store.holder == ""
        assert len(await store.list()) == 8


async def test_a_record_that_is_deleted_after_it_was_listed_is_gone_and_not_damaged(root):
    newest = record_files(root)[0]

    async with Stores().open(root) as store:
        report = await verify(store, lambda what, done, *_: newest.unlink(missing_ok=True))

    assert (report.gone, report.records, report.wrong) == (1, 7, {})


async def test_a_record_that_is_deleted_while_it_is_read_is_read_to_its_end(root):
    file = record_files(root)[0]
    expected = os.urandom(PIECE_BYTES + 8192)
    file.write_bytes(expected)

    def visit(pieces):
        read = bytes(next(pieces))
        file.unlink()
        return [read, *map(bytes, pieces)]

    async with Stores().open(root) as store:
        pieces = await store.examine(StoredRecord(ChunkKey(bytes.fromhex(file.name)), len(expected)), visit)

    assert [len(piece) for piece in pieces] == [PIECE_BYTES, 8192]
    assert b"".join(pieces) == expected
