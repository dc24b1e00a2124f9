"""A directory has one owner at a time, whatever its name and process, and its files are private."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import stat
import time

import pytest

from lmcache_async.errors import TierUnavailableError
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.testing.records import key_of, record
from lmcache_async.types import ChunkKey
from tests.tiers.disk_tools import RECORD_BYTES, bytes_in, get, path_of, put


async def open_and_close(config: DiskConfig) -> None:
    async with DiskTier(config):
        pass


def test_another_process_is_refused_until_the_owner_is_killed_also_when_its_child_lives_on(children, config):
    lines = children.start("own", path=str(config.path), ready="owner")
    _, owner, orphan = next(lines).split()
    try:
        with pytest.raises(
            TierUnavailableError, match=rf"{config.root} is in use by process {owner}: give each"
        ):
            asyncio.run(open_and_close(config))
        os.kill(int(owner), signal.SIGKILL)
        assert [*lines] == [f"dead {int(signal.SIGKILL)}"]

        asyncio.run(open_and_close(config))
    finally:
        os.kill(int(orphan), signal.SIGKILL)


def test_a_forked_child_cannot_use_the_tier_and_takes_nothing_from_the_parent(children, config):
    said = children.run("use_after_fork", path=str(config.path))

    assert said == [
        "stored",
        "TierClosedError",
        "TierClosedError",
        "TierInUseError",
        "child 0",
        "stored",
        "hit",
        "reopened",
    ]


def test_links_and_further_mounts_lead_to_the_same_lock(children, config, tmp_path):
    config.path.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    said = children.run("two_mounts", path=str(config.path), other=str(other))

    assert len(said) in {1, 2}  # mounting needs rights
    assert all(line.startswith("refused: ") and "is in use by process" in line for line in said)


async def test_deleting_the_lock_file_does_not_release_the_directory(config):
    async with DiskTier(config):
        (config.root / "lock").unlink()
        with pytest.raises(TierUnavailableError, match="in use by process"):
            await open_and_close(config)
    await open_and_close(config)


async def test_a_check_by_doctor_at_the_moment_of_an_opening_does_not_refuse_it(config, monkeypatch):
    await open_and_close(config)
    checking = os.open(config.root, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(checking, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as `doctor` does
    monkeypatch.setattr(time, "sleep", lambda _: os.close(checking))

    async with DiskTier(config):
        pass


async def test_files_that_cannot_be_closed_do_not_keep_the_directory_locked(config, monkeypatch):
    """Network file systems report a write that exceeds the quota when the file is closed."""
    real = os.close

    def close(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    tier = await DiskTier(config).__aenter__()
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        await tier.__aexit__()

    await open_and_close(config)


async def test_a_second_tier_of_the_same_process_with_the_same_directory_is_refused(config):
    async with DiskTier(config):
        with pytest.raises(
            TierUnavailableError, match=rf"process {os.getpid()} \(this one\): give each tier"
        ):
            await open_and_close(config)


async def test_a_lock_file_that_is_a_link_is_an_error_that_names_it(config):
    config.root.mkdir()
    (config.root / "lock").symlink_to("/etc/passwd")
    with pytest.raises(TierUnavailableError, match="lock"):
        await open_and_close(config)
    assert (config.root / "lock").is_symlink()
    (config.root / "lock").unlink()
    (config.root / "lock").write_bytes(b"\xff\0not a number" * 1000)
    await open_and_close(config)


async def test_a_moved_directory_stays_open_and_another_one_at_its_path_is_not_changed(
    config, arena, allocate
):
    moved = config.path.with_name("moved")
    async with DiskTier(config) as first:
        await put(first, arena, 1, 2)
        config.root.rename(moved)
        async with DiskTier(config) as second:
            await put(second, arena, 3)
            await put(first, arena, 4)

            assert bytes_in(config.root) == second.statistics().bytes == RECORD_BYTES
            assert bytes_in(moved) == first.statistics().bytes == 3 * RECORD_BYTES
            assert await first.clear() == 3
            assert await get(second, allocate, 3)
        with pytest.raises(TierUnavailableError, match="in use"):
            await open_and_close(config.model_copy(update={"path": moved}))


async def test_a_directory_deleted_and_taken_by_another_is_not_written_to(config, arena, allocate):
    async with DiskTier(config) as first:
        await put(first, arena, 1)
        shutil.rmtree(config.root)
        async with DiskTier(config) as second:
            await put(second, arena, 1, 2)
            with record(arena, 3) as buffer, pytest.raises(TierUnavailableError, match="in use by process"):
                await first.put(key_of(3), buffer)
            assert not await get(first, allocate, 1)
            assert await first.clear() == 0

            assert await get(second, allocate, 1)
            assert second.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES
        assert first.statistics().bytes == 0
        (config.root / "tmp" / f"{key_of(9).hex()}.0").write_bytes(bytes(5000))  # if it was killed
        await put(first, arena, 3)  # the other has closed
        assert await get(first, allocate, 3)
        assert first.statistics().bytes == bytes_in(config.root) == RECORD_BYTES


async def test_every_created_directory_and_file_is_private(config, arena):
    config = config.model_copy(
        update={
            "path": config.path / "a" / "b",
            "subdirectory": "c/rank-0",
            "quarantine": True,
            "fsync": True,
        }
    )
    old = os.umask(0)
    try:
        async with DiskTier(config) as tier:
            await put(tier, arena, 1, 2)
            await tier.reject(key_of(2), "checksum")
            shutil.rmtree(config.path)
            await put(tier, arena, 3)
            await tier.reject(key_of(3), "checksum")
            await put(tier, arena, 4)
    finally:
        os.umask(old)
    top = config.path.parent.parent
    there = [top, *top.rglob("*")]

    assert len(there) > 8
    for path in there:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


async def test_a_directory_that_others_may_write_to_is_warned_of(config, caplog):
    config.root.mkdir()
    config.root.chmod(0o770)
    await open_and_close(config)
    assert "has mode 770" in caplog.text
    assert "chmod 700" in caplog.text
    caplog.clear()
    config.root.chmod(0o750)
    await open_and_close(config)
    assert caplog.text == ""


@pytest.mark.parametrize("key", [b"", b"../../../../etc", b"x" * 15, b"x" * 17, b"/" * 32])
def test_a_key_of_another_length_names_no_file(tmp_path, key):
    directory = RecordDirectory(tmp_path)
    with pytest.raises(ValueError, match="a key has 16 bytes"):
        directory.record_name(ChunkKey(key))
    with pytest.raises(ValueError, match="a key has 16 bytes"):
        directory.temporary_name(ChunkKey(key))


async def test_an_existing_directory_keeps_its_mode(config, arena):
    config.path.mkdir(mode=0o755)
    config.path.chmod(0o755)
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)

    assert stat.S_IMODE(config.path.stat().st_mode) == 0o755
    assert stat.S_IMODE(path_of(config, 1).stat().st_mode) == 0o600
