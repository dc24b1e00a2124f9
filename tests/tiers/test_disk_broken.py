"""Broken records, and other files in their place: never served, counted, logged, set aside."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from lmcache_async.errors import TierClosedError, TierUnavailableError
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import index as disk_index
from lmcache_async.plugins.disk import tier as disk_tier
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.testing.records import key_of, record
from tests.tiers.disk_tools import RECORD_BYTES, FailingCall, bytes_in, get, path_of, put

DAMAGES = {  # by kind: the edit of the file, and the cause that is counted
    "magic": (lambda content: b"X" + content[1:], "magic"),
    "version": (lambda content: content[:8] + b"\x63" + content[9:], "version"),
    "header": (lambda content: content[:14] + b"\xff" * 8 + content[22:], "length"),
    "overwritten": (lambda content: bytes(len(content)), "magic"),
    "cut": (lambda content: content[:-100], "length"),
    "length": (lambda content: content[:-4096], "length"),
    "grown": (lambda content: content + bytes(4096), "length"),
    "empty": (lambda content: b"", "length"),
}


@pytest.fixture
def keeping(config):
    return config.model_copy(update={"quarantine": True})


def damage(config: DiskConfig, number: int, kind: str = "magic") -> bytes:
    path = path_of(config, number)
    content = DAMAGES[kind][0](path.read_bytes())
    path.write_bytes(content)
    return content


def flip_payload(config: DiskConfig, number: int) -> None:
    with path_of(config, number).open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))


def kept(config: DiskConfig) -> dict[str, bytes]:
    folder = config.root / "quarantine"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.mark.parametrize("kind", sorted(DAMAGES))
async def test_a_broken_record_is_a_miss_removed_counted_by_cause_and_logged_once(
    config, arena, allocate, caplog, kind
):
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2, 3)
        for number in (1, 2):
            damage(config, number, kind)
        with caplog.at_level(logging.WARNING):
            assert [await get(tier, allocate, number) for number in (1, 2, 3)] == [False, False, True]

        cause = DAMAGES[kind][1]
        assert tier.statistics().corrupt_by_cause == {cause: 2}
        assert tier.statistics().corrupt == 2
        [line] = [entry.getMessage() for entry in caplog.records]
        assert str(path_of(config, 1)) in line
        assert cause in line
        assert not path_of(config, 1).exists()
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES
        await put(tier, arena, 1)
        assert await get(tier, allocate, 1)


async def test_a_broken_record_is_kept_in_the_quarantine_by_option(keeping, arena, allocate):
    async with DiskTier(keeping) as tier:
        await put(tier, arena, 1, 2)
        content = damage(keeping, 1)
        assert not await get(tier, allocate, 1)

        assert kept(keeping) == {f"{key_of(1).hex()}.magic": content}
        assert not path_of(keeping, 1).exists()
        assert tier.statistics().bytes == bytes_in(keeping.root) == RECORD_BYTES
        await put(tier, arena, 1)
        assert await get(tier, allocate, 1)
    async with DiskTier(keeping) as tier:
        assert tier.statistics().chunks == 2  # files in that directory are not found again
        assert len(kept(keeping)) == 1


async def test_records_that_fail_verification_are_rejected_with_the_cause(keeping, arena):
    async with DiskTier(keeping) as tier:
        await put(tier, arena, 1)
        assert await tier.reject(key_of(1), "tokens")
        assert not await tier.reject(key_of(1), "tokens")
        assert not await tier.contains(key_of(1))
        await put(tier, arena, 2)
        assert await tier.reject(key_of(2), "../../etc/X\0")

        assert sorted(kept(keeping)) == [f"{key_of(1).hex()}.tokens", f"{key_of(2).hex()}.etcx"]
        assert tier.statistics().bytes == bytes_in(keeping.root) == 0


async def test_the_quarantine_keeps_the_newest_records_within_its_limit(keeping, arena):
    keeping = keeping.model_copy(update={"max_quarantine_bytes": 2 * RECORD_BYTES})
    async with DiskTier(keeping) as tier:
        for number in range(5):
            await put(tier, arena, number)
            await tier.reject(key_of(number), "checksum")
            assert sum(map(len, kept(keeping).values())) <= 2 * RECORD_BYTES

        assert len(kept(keeping)) == 2
        assert f"{key_of(4).hex()}.checksum" in kept(keeping)
    small = keeping.model_copy(update={"max_quarantine_bytes": RECORD_BYTES})
    (keeping.root / "quarantine" / "notes.txt").write_text("mine")
    async with DiskTier(small):
        assert len(kept(small)) == 2  # one record, and a foreign file


async def test_a_record_that_cannot_be_moved_to_the_quarantine_is_deleted(keeping, arena, monkeypatch):
    rename = FailingCall(monkeypatch, "rename")
    async with DiskTier(keeping) as tier:
        await put(tier, arena, 1)
        rename.fail(errno.EIO)
        assert await tier.reject(key_of(1), "checksum")

        assert kept(keeping) == {}
        assert tier.statistics().bytes == bytes_in(keeping.root) == 0


async def test_files_found_broken_at_the_start_go_to_the_quarantine(keeping, arena, caplog):
    async with DiskTier(keeping) as tier:
        await put(tier, arena, 1, 2)
    path_of(keeping, 1).write_bytes(b"x" * 100)
    with caplog.at_level(logging.WARNING):
        async with DiskTier(keeping) as tier:
            assert tier.statistics().corrupt_by_cause == {"length": 1}
            assert kept(keeping) == {f"{key_of(1).hex()}.length": b"x" * 100}
    assert "1 record files of an invalid size" in caplog.text


async def test_the_quarantine_is_listed_once_for_all_files_found_broken_at_the_start(
    keeping, arena, monkeypatch
):
    async with DiskTier(keeping) as tier:
        await put(tier, arena, *range(5))
    for number in range(5):
        path_of(keeping, number).write_bytes(b"x" * 100)
    list_files, listed = RecordDirectory.list_files, []

    def note(self, folder, names):
        listed.append(folder)
        return list_files(self, folder, names)

    monkeypatch.setattr(RecordDirectory, "list_files", note)
    async with DiskTier(keeping.model_copy(update={"max_quarantine_bytes": 300})):
        assert len(kept(keeping)) == 3
    assert listed.count("quarantine") == 1


async def test_a_broken_record_that_cannot_be_deleted_is_no_hit_and_its_bytes_count(
    config, arena, allocate, monkeypatch
):
    unlink = FailingCall(monkeypatch, "unlink")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2, 3)
        unlink.fail(errno.EROFS, times=3)
        damage(config, 1)
        assert not await get(tier, allocate, 1)
        assert await tier.reject(key_of(2), "checksum")

        assert await tier.contains_many([key_of(1), key_of(2), key_of(3)]) == [False, False, True]
        assert tier.statistics().bytes == bytes_in(config.root) == 3 * RECORD_BYTES
        await put(tier, arena, 4)  # one was deleted in the process, the other not yet
        assert tier.statistics().bytes == bytes_in(config.root) == 3 * RECORD_BYTES
        await put(tier, arena, 1)
        assert await get(tier, allocate, 1)
        assert tier.statistics().bytes == bytes_in(config.root) == 3 * RECORD_BYTES


async def test_a_record_put_over_one_that_could_not_be_deleted_is_counted_once(
    config, arena, allocate, monkeypatch
):
    unlink = FailingCall(monkeypatch, "unlink")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        unlink.fail(errno.EIO, times=2)
        damage(config, 1)
        assert not await get(tier, allocate, 1)
        await put(tier, arena, 1)

        assert unlink.times == 1  # the new file replaced it
        unlink.times = 0
        assert await get(tier, allocate, 1)
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES


@pytest.mark.parametrize("thing", ["fifo", "socket", "link", "directory"])
async def test_a_record_path_that_is_not_a_regular_file_is_an_immediate_miss(
    config, arena, allocate, tmp_path, monkeypatch, thing
):
    monkeypatch.setattr(disk_index, "STAMP_AGE_NS", -1)  # every read sets the time of use
    elsewhere = tmp_path / "elsewhere"
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        path = path_of(config, 1)
        elsewhere.write_bytes(path.read_bytes())
        changed_ns = elsewhere.stat().st_mtime_ns
        path.unlink()
        if thing == "fifo":
            os.mkfifo(path)
        elif thing == "socket":
            here = Path.cwd()
            os.chdir(path.parent)  # the path of a socket is limited
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
            os.chdir(here)
        elif thing == "link":
            path.symlink_to(elsewhere)
        else:
            (path / "inside").mkdir(parents=True)

        assert not await asyncio.wait_for(get(tier, allocate, 1), 30)
        assert tier.statistics().corrupt_by_cause == {"file": 1}
        assert not await tier.contains(key_of(1))
        assert elsewhere.stat().st_mtime_ns == changed_ns
        if thing == "directory":  # a foreign entry, which is not deleted
            with record(arena, 1) as buffer, pytest.raises(TierUnavailableError, match="directory"):
                await tier.put(key_of(1), buffer)
            assert (path / "inside").exists()
        else:
            await put(tier, arena, 1)
            assert await get(tier, allocate, 1)
        assert await get(tier, allocate, 2)
        assert tier.statistics().bytes == bytes_in(config.root)


async def test_a_foreign_fifo_with_the_name_of_the_next_file_stays(config, arena, allocate):
    (config.root / "tmp").mkdir(parents=True)
    there = [
        config.root / "tmp" / f"{key.hex()}.{number}" for key in (bytes(16), key_of(1)) for number in (0, 1)
    ]
    for path in there:
        os.mkfifo(path)

    async with DiskTier(config) as tier:
        for _ in range(3):  # each attempt uses the next name
            with record(arena, 1) as buffer, suppress(TierUnavailableError):
                await tier.put(key_of(1), buffer)

        assert await get(tier, allocate, 1)
        assert all(path.is_fifo() for path in there)


@pytest.mark.parametrize("thing", ["file", "link"])
async def test_a_shard_directory_replaced_by_a_file_or_link_is_not_followed(
    config, arena, allocate, tmp_path, thing
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        shard = path_of(config, 1).parent
        path_of(config, 1).unlink()
        shard.rmdir()
        if thing == "file":
            shard.write_text("notes")
        else:
            shard.symlink_to(elsewhere)

        assert not await get(tier, allocate, 1)
        with record(arena, 1) as buffer, pytest.raises(TierUnavailableError):
            await tier.put(key_of(1), buffer)
        assert list(elsewhere.iterdir()) == []
        assert tier.statistics().bytes == 0
        shard.unlink()
        await put(tier, arena, 1)
        assert await get(tier, allocate, 1)


async def test_a_record_that_a_link_leads_to_is_neither_read_nor_changed(config, arena, allocate, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        shard = path_of(config, 1).parent
        shard.rename(elsewhere)
        shard.symlink_to(elsewhere)
        there = sorted(elsewhere.iterdir())

        assert await tier.remove(key_of(1))
        assert not await get(tier, allocate, 2)
        assert sorted(elsewhere.iterdir()) == there
        assert tier.statistics().bytes == 0


async def test_a_scrub_verifies_every_record_and_finds_damage_of_unread_ones(config, arena, allocate):
    async with DiskTier(config) as tier:
        await put(tier, arena, *range(6))
        flip_payload(config, 2)
        damage(config, 3, "length")
        path_of(config, 4).unlink()
        path_of(config, 5).replace(path_of(config, 0))  # a valid record of another key

        report = await tier.scrub()

        assert (report.chunks, report.errors) == (1, 0)
        assert report.corrupt == {"checksum": 1, "length": 1, "key": 1}
        assert report.bytes == 4 * RECORD_BYTES
        assert tier.statistics().corrupt_by_cause == report.corrupt
        assert [number for number in range(6) if await tier.contains(key_of(number))] == [1]
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES
        assert await get(tier, allocate, 1)


async def test_a_scrub_leaves_the_order_of_use_and_the_slabs_alone(config, arena):
    config = config.model_copy(update={"max_bytes": 3 * RECORD_BYTES})
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2, 3)
        peak = arena.statistics().peak_leased_slabs
        stamps = [path_of(config, number).stat().st_mtime_ns for number in (1, 2, 3)]
        assert (await tier.scrub()).chunks == 3
        assert [path_of(config, number).stat().st_mtime_ns for number in (1, 2, 3)] == stamps
        assert arena.statistics().peak_leased_slabs == peak
        await put(tier, arena, 4)

        assert [number for number in range(5) if await tier.contains(key_of(number))] == [2, 3, 4]


async def test_a_record_that_a_scrub_cannot_read_stays(config, arena, allocate, monkeypatch):
    preadv = FailingCall(monkeypatch, "preadv")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        preadv.fail(errno.EIO)
        report = await tier.scrub()

        assert (report.chunks, report.errors, report.corrupt) == (1, 1, {})
        assert await get(tier, allocate, 1)
        assert await get(tier, allocate, 2)


async def test_a_scrub_does_not_exceed_its_rate(config, arena, monkeypatch):
    pauses: list[float] = []
    timeout = asyncio.timeout

    def note(seconds: float) -> asyncio.Timeout:
        pauses.append(seconds)
        return timeout(0)

    async with DiskTier(config) as tier:
        await put(tier, arena, *range(4))
        monkeypatch.setattr(disk_tier.asyncio, "timeout", note)
        await tier.scrub(max_bytes_per_s=RECORD_BYTES // 96)
        monkeypatch.undo()

    # A record takes 96 s at that rate, and the fake sleep does not advance the clock, so each pause is that much
    # longer.
    assert len(pauses) == 4
    assert all(96 * (n + 1) - 30 < pause <= 96 * (n + 1) for n, pause in enumerate(pauses))


async def test_a_scrub_runs_in_the_background_by_option_and_ends_with_the_tier(config, arena):
    config = config.model_copy(update={"scrub_interval_s": 0.001})
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        flip_payload(config, 1)
        while tier.statistics().corrupt == 0:
            await asyncio.sleep(0)
        assert tier.statistics().corrupt_by_cause == {"checksum": 1}
        assert await tier.contains(key_of(2))
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_closing_ends_a_scrub(config, arena):
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        running = asyncio.ensure_future(tier.scrub(max_bytes_per_s=1))  # hours
        cancelled = asyncio.ensure_future(tier.scrub(max_bytes_per_s=1))
        for _ in range(3):
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not running.done()
    with pytest.raises(TierClosedError, match="was closed"):
        await running


@pytest.mark.parametrize(
    "error", [TierUnavailableError("failed for this test"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))]
)
async def test_periodic_scrubs_continue_after_one_that_failed(config, monkeypatch, error):
    scrub, runs, second = DiskTier.scrub, 0, asyncio.Event()

    async def fail_once(tier, *, max_bytes_per_s=None):
        nonlocal runs
        runs += 1
        if runs == 1:
            raise error
        second.set()
        return await scrub(tier, max_bytes_per_s=max_bytes_per_s)

    monkeypatch.setattr(DiskTier, "scrub", fail_once)
    async with DiskTier(config.model_copy(update={"scrub_interval_s": 0.001})):
        await second.wait()
