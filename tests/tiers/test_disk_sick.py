"""A disk that is full, read-only, missing, locked or stuck: misses and drops, and recovery afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_async.errors import TierClosedError, TierError, TierUnavailableError
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.testing.conformance.base import in_time
from lmcache_async.testing.fakes import HandleTier
from lmcache_async.testing.records import key_of, record
from tests.support.forks import REPOSITORY
from tests.support.processes import open_fds
from tests.support.tiers import handle_of
from tests.tiers.disk_tools import RECORD_BYTES, FailingCall, bytes_in, gate_of, get, path_of, put, turns


@pytest.fixture
def place(tmp_path_factory):
    """A directory in which a user other than root may create directories."""
    path = tmp_path_factory.mktemp("open")
    path.chmod(0o777)
    closed = [
        parent for parent in path.parents if parent.stat().st_uid == os.getuid() and parent != Path("/")
    ]
    modes = {parent: parent.stat().st_mode for parent in closed}
    for parent in closed:
        parent.chmod(modes[parent] | 0o011)
    yield path
    for parent in closed:
        parent.chmod(modes[parent])


def test_a_full_file_system_evicts_old_chunks_and_then_drops_new_ones_until_there_is_room(children, place):
    said = children.run("full_disk", path=str(place))

    assert said[0] in {"mounted", "not mounted"}  # without rights, see the injected errors in test_disk.py
    assert said[1:] == ["stored", "stored hit"]


def test_revoked_permissions_cause_misses_until_they_are_restored(children, place):
    said = children.run("no_rights", path=str(place))

    refused = "TierUnavailableError"
    assert said[0] == "stored hit"
    assert [line for line in said if line.startswith("back: ")] == ["back: stored hit hit"] * 5
    assert [line for line in said if ": " in line and not line.startswith(("back", "start"))] == [
        f"kv 0: {refused} {refused} {refused}",
        "kv 500: stored miss removed",
        f"00 0: {refused} {refused} {refused}",
        f"00 500: {refused} hit {refused}",
        f"tmp 0: {refused} miss removed",
    ]
    assert said[-2].startswith(f"start: {refused} cannot open {place / 'kv'}: ")
    assert "Permission denied" in said[-2]
    assert said[-1] == "hit"


async def test_a_read_only_disk_serves_its_records_and_stores_again_when_writable(
    config, arena, allocate, monkeypatch
):
    real_open = os.open
    read_only = True

    def refuse_writers(path: object, flags: int, *args: object, **options: object) -> int:
        if read_only and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *args, **options)  # type: ignore[arg-type]

    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        fds = open_fds()
        monkeypatch.setattr(disk_files, "publish_file", None)
        monkeypatch.setattr(os, "open", refuse_writers)
        for name in ("unlink", "replace", "utime", "mkdir"):
            FailingCall(monkeypatch, name).fail(errno.EROFS, times=1_000_000)
        for _ in range(3):
            with record(arena, 3) as buffer, pytest.raises(TierUnavailableError, match="Read-only"):
                await tier.put(key_of(3), buffer)
            with pytest.raises(TierUnavailableError, match="Read-only"):
                await tier.remove(key_of(1))
            assert await get(tier, allocate, 1)
            assert await get(tier, allocate, 2)
        assert await tier.reject(key_of(2), "checksum")
        assert not await get(tier, allocate, 2)
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES

        monkeypatch.undo()
        await put(tier, arena, 3)
        assert [await get(tier, allocate, number) for number in (1, 2, 3)] == [True, False, True]
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES
        assert open_fds() <= fds


async def test_a_deleted_directory_is_created_again_without_its_records(config, arena, allocate):
    parent = config.path.parent / "mount"
    config = config.model_copy(update={"path": parent / "kv"})
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2, 3)
        fds = open_fds()
        shutil.rmtree(parent)
        parent.write_text("no directory can be made here")
        for _ in range(2):
            assert not await get(tier, allocate, 1)
            with record(arena, 4) as buffer, pytest.raises(TierUnavailableError):
                await tier.put(key_of(4), buffer)
        assert open_fds() <= fds
        parent.unlink()

        await put(tier, arena, 4)
        with pytest.raises(TierUnavailableError, match="in use"):  # the new directory is locked
            await DiskTier(config).__aenter__()
        assert [await get(tier, allocate, number) for number in (1, 2, 3, 4)] == [False] * 3 + [True]
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES
        assert open_fds() <= fds


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
async def test_calls_of_a_disk_that_hangs_end_at_their_deadline_until_it_recovers(
    config, arena, allocate, monkeypatch, call
):
    gate = gate_of(monkeypatch, call)
    config = config.model_copy(update={"io_threads": 2})
    inner = DiskTier(config)
    handle = handle_of(inner, timeout_s=0.05)
    tier = HandleTier(handle)
    free = arena.statistics().leased_slabs

    async def call_stuck(number: int) -> None:
        with (
            record(arena, number) as buffer,
            pytest.raises(TierUnavailableError, match="did not answer in"),
        ):
            await (tier.get(key_of(1), allocate) if call == "preadv" else tier.put(key_of(number), buffer))
        await turns()

    async with tier:
        with record(arena, 1) as buffer:
            await inner.put(key_of(1), buffer)
        fds = open_fds()
        gate.shut()
        number = 1
        # A call whose deadline passes before its thread begins is withdrawn, as on a busy machine.
        while handle.late_calls < config.io_threads:
            number += 1
            await call_stuck(number)
        for _ in range(2):  # more than the number of threads
            number += 1
            await call_stuck(number)
        late, leased = handle.late_calls, arena.statistics().leased_slabs - free
        there = await tier.contains(key_of(1))  # operations without disk access continue
        gate.open()
        assert (late, leased, there) == (2, 2, True)  # the other two were never started, and have ended
        assert await handle.drain(timeout_s=60)

        assert arena.statistics().leased_slabs == free
        assert await get(inner, allocate, 1)
        await put(inner, arena, 9)
        assert tier.statistics().bytes == bytes_in(config.root)
        assert open_fds() <= fds


async def test_a_read_of_a_corrupt_record_does_not_wait_for_writes(config, arena, allocate, monkeypatch):
    gate = gate_of(monkeypatch, "pwrite")
    async with DiskTier(config.model_copy(update={"io_threads": 1})) as tier:
        await put(tier, arena, 1, 2)
        os.truncate(path_of(config, 2), 4096)
        gate.shut()
        writing = asyncio.ensure_future(put(tier, arena, 3))
        await gate.reached()
        try:
            whole, corrupt = await in_time(tier.get_many([key_of(1), key_of(2)], allocate))
        finally:
            gate.open()
        await writing

        whole.release()
        assert corrupt is None
        assert bytes_in(config.root) == tier.statistics().bytes == 2 * RECORD_BYTES


async def test_a_cancelled_closing_keeps_the_lock_until_hanging_calls_have_ended(config, arena, monkeypatch):
    gate = gate_of(monkeypatch, "pwrite")
    tier = DiskTier(config)
    await tier.__aenter__()
    buffer = record(arena, 1)
    gate.shut()
    writing = asyncio.ensure_future(tier.put(key_of(1), buffer))
    await gate.reached()
    closing = asyncio.ensure_future(tier.__aexit__(None, None, None))
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    with pytest.raises(TierUnavailableError, match="in use by process"):
        await DiskTier(config).__aenter__()
    with pytest.raises(TierError, match="not open"):
        await tier.put(key_of(1), buffer)
    gate.open()
    await writing
    buffer.release()
    await reopened(config, holds=1)


def test_the_interpreter_ends_although_a_call_is_stuck(tmp_path):
    code = f"from tests.tiers.disk_child import end_while_stuck; end_while_stuck({str(tmp_path)!r})"

    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
        check=True,
    )

    assert ended.stdout.split() == ["TierUnavailableError", "closed"]


async def test_a_removal_that_closing_withdraws_is_an_error_and_the_record_stays(config, arena, monkeypatch):
    gate = gate_of(monkeypatch, "unlink")
    tier = DiskTier(config)
    await tier.__aenter__()
    await put(tier, arena, 1, 2, 3)
    gate.shut()
    running = asyncio.ensure_future(tier.remove(key_of(1)))
    await gate.reached()
    removing = asyncio.ensure_future(tier.remove(key_of(2)))
    rejecting = asyncio.ensure_future(tier.reject(key_of(3), "payload"))
    await turns()
    closing = asyncio.ensure_future(tier.__aexit__(None, None, None))
    await turns()
    closing.cancel()
    results = await asyncio.gather(removing, rejecting, closing, return_exceptions=True)
    gate.open()

    assert await running
    assert [type(result) for result in results] == [TierClosedError, TierClosedError, asyncio.CancelledError]
    await reopened(config, holds=2)


async def test_a_cancelled_opening_releases_the_lock_when_it_has_ended(config, monkeypatch):
    gate = gate_of(monkeypatch, "scandir", shut=True)
    opening = asyncio.ensure_future(DiskTier(config).__aenter__())
    await gate.reached()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening

    gate.open()
    await reopened(config, holds=0)


async def reopened(config: DiskConfig, *, holds: int) -> None:
    """Check that the tier can be opened soon, and has this number of records."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with DiskTier(config) as tier:
                    assert tier.statistics().chunks == holds
                    return
            except TierUnavailableError:
                await asyncio.sleep(0)
