"""The disk tier: the contract, a comparison with a dict, and changes to its directory from outside."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    ConfigError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.memory.buffer import Buffer, pages
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.testing.conformance import SuffixEvictionConformance, TierConformance
from lmcache_async.testing.machines import TierMachine
from lmcache_async.testing.machines.tier import LENGTHS
from lmcache_async.testing.records import FORMAT, key_of, record
from lmcache_async.types import ChunkKey
from tests.support.thorough import machine_settings
from tests.tiers.disk_tools import (
    RECORD_BYTES,
    FailingCall,
    bytes_in,
    files_in,
    gate_of,
    get,
    path_of,
    put,
    turns,
)


def edit_file(root: Path, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
    path = root / key.hex()[:2] / key.hex()
    path.write_bytes(edit(path.read_bytes()))
    return True


class DiskConformance(TierConformance, SuffixEvictionConformance):
    options: ClassVar[dict[str, object]] = {}
    many_keys = 500

    @pytest.fixture
    def tier(self, tmp_path):
        return DiskTier(DiskConfig(path=tmp_path / "kv", max_bytes=1 << 30, **self.options))

    async def damage(self, tier: DiskTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return edit_file(tier.config.root, key, edit)


class TestDiskTier(DiskConformance):
    many_keys = 3000


@pytest.mark.one_loop
class TestDiskTierBuffered(DiskConformance):
    options: ClassVar[dict[str, object]] = {"odirect": False, "io_threads": 1}


@pytest.mark.one_loop
class TestDiskTierDurable(DiskConformance):
    options: ClassVar[dict[str, object]] = {"fsync": True}


def file_bytes(number: int) -> int:
    return pages(FORMAT.record_bytes(LENGTHS[number]))


class DiskMachine(TierMachine):
    @rule(direct=st.sampled_from(["auto", False]))
    def restart_with(self, direct: bool) -> None:
        self.direct = direct
        self.restart()

    def make_tier(self, directory: Path, max_bytes: int | None) -> DiskTier:
        config = DiskConfig(
            path=directory / "kv",
            max_bytes=max_bytes or 1 << 30,
            odirect=getattr(self, "direct", "auto"),
            io_threads=2,
        )
        self.root = config.root
        return DiskTier(config)

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return edit_file(self.root, key, edit)

    @rule()
    def restart_after_a_kill(self) -> None:
        name = key_of(3).hex()
        (self.root / "tmp" / f"{name}.12").write_bytes(b"x" * 5000)  # left by a killed writer
        self.restart()
        assert list((self.root / "tmp").iterdir()) == []

    @invariant()
    def bytes_are_exact(self) -> None:
        if not hasattr(self, "tier") or self.model.damaged:
            return
        statistics = self.tier.statistics()
        keys = self.run(self.rig.keys())
        held = [number for number in range(len(LENGTHS)) if key_of(number) in keys]
        assert statistics.chunks == len(held)
        assert statistics.bytes == sum(map(file_bytes, held))
        files = [path for path in self.root.rglob("*") if path.is_file() and path.name != "lock"]
        assert sum(path.stat().st_size for path in files) == statistics.bytes


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = machine_settings(25)


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
async def test_a_file_of_incomplete_pages_is_removed_at_the_start(config, arena, allocate, damage):
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
    path_of(config, 1).write_bytes(damage)

    async with DiskTier(config) as tier:
        assert tier.statistics().corrupt == 1
        assert tier.statistics().bytes == RECORD_BYTES
        assert not path_of(config, 1).exists()
        assert await get(tier, allocate, 2)


async def test_a_deleted_file_is_a_miss_and_can_be_put_again(config, arena, allocate):
    removed = []
    tier = DiskTier(config)
    tier.on_evicted = removed.extend
    async with tier:
        await put(tier, arena, 1, 2)
        path_of(config, 1).unlink()
        path_of(config, 2).unlink()

        assert not await get(tier, allocate, 1)
        assert tier.statistics().corrupt == 0
        await put(tier, arena, 2)
        assert await get(tier, allocate, 2)
        assert tier.statistics().bytes == RECORD_BYTES
        assert removed == [key_of(1), key_of(2)]


async def test_files_and_folders_that_others_delete_during_the_start_do_not_prevent_it(
    config, arena, allocate, monkeypatch
):
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 1 << 120)
    (config.root / "tmp" / f"{key_of(1).hex()}.0").touch()
    folder = path_of(config, 1).parent
    scandir, unlink = os.scandir, os.unlink

    @contextlib.contextmanager
    def delete_folder(place):
        with scandir(place) as entries:
            found = list(entries)
        if folder.name in [entry.name for entry in found]:
            unlink(path_of(config, 1))
            folder.rmdir()
        yield iter(found)

    def delete_first(name, **options):
        unlink(name, **options)
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", delete_folder)
        patch.setattr(os, "unlink", delete_first)
        await tier.__aenter__()

    assert [key async for key in tier.keys()] == [key_of(1 << 120)]  # noqa: SIM118 - no dict
    await put(tier, arena, 1)
    assert await get(tier, allocate, 1)
    await tier.__aexit__(None, None, None)


async def test_concurrent_writes_create_a_deleted_directory_again_once(config, arena, monkeypatch):
    met = threading.Barrier(2)
    prepare = RecordDirectory.prepare

    def prepare_together(directory: RecordDirectory) -> None:
        met.wait(20)
        prepare(directory)

    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        shutil.rmtree(config.root)
        monkeypatch.setattr(RecordDirectory, "prepare", prepare_together)

        records = [(key_of(number), record(arena, number)) for number in (2, 3)]
        results = await tier.put_many(records)
        for _, buffer in records:
            buffer.release()

    assert results == [None, None]


async def test_foreign_files_are_neither_counted_nor_deleted(config, arena):
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
    name = key_of(1).hex()
    foreign = [
        config.root / "notes.txt",
        config.root / "tmp" / "download.part",
        config.root / "zz" / name,
        config.root / "ab" / name,  # in another shard
        config.root / name[:2] / (name + ".bak"),
        config.root / name[:2] / name.upper().replace("0", "F"),
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10)
    (config.root / name[:2] / ("f" * 32)).mkdir()
    target = config.root.parent / "elsewhere"
    target.write_bytes(bytes(4096))
    link = config.root / name[:2] / (name[:2] + "e" * 30)
    link.symlink_to(target)

    async with DiskTier(config) as tier:
        assert tier.statistics().bytes == RECORD_BYTES
        assert tier.statistics().corrupt == 0
        assert await tier.clear() == 1
    assert all(path.exists() for path in [*foreign, link, target])


async def test_a_smaller_limit_drops_the_least_recently_used_at_the_start(config, arena):
    async with DiskTier(config) as tier:
        await tier.contains_many([key_of(number) for number in range(4)])  # one prompt
        await put(tier, arena, 0, 1, 2, 3)
        await put(tier, arena, 10)
    small = config.model_copy(update={"max_bytes": 4 * RECORD_BYTES - 1})
    async with DiskTier(small) as tier:
        held = [number for number in (0, 1, 2, 3, 10) if await tier.contains(key_of(number))]

        assert held == [0, 1, 10]
        assert bytes_in(config.root) == tier.statistics().bytes == 3 * RECORD_BYTES
        assert tier.statistics().evictions == 2


async def test_a_read_counts_as_use_also_after_a_restart(config, arena, allocate):
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
    for number, mtime in ((1, 1000), (2, 2000)):
        os.utime(path_of(config, number), (mtime, mtime))
    async with DiskTier(config) as tier:
        assert await get(tier, allocate, 1)
    small = config.model_copy(update={"max_bytes": RECORD_BYTES})

    async with DiskTier(small) as tier:
        assert await tier.contains(key_of(1))
        assert not await tier.contains(key_of(2))


async def test_bytes_that_are_not_a_record_are_refused(config, arena):
    async with DiskTier(config) as tier:
        with record(arena, 1) as buffer:
            buffer.resize(buffer.nbytes - 4096)
            with pytest.raises(ChunkCorruptError):
                await tier.put(key_of(1), buffer)
        with arena.lease_nowait(10) as buffer, pytest.raises(ChunkCorruptError):
            await tier.put(key_of(2), buffer)

        assert tier.statistics().bytes == bytes_in(config.root) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_evicts_old_chunks_for_new_ones(config, arena, allocate, monkeypatch, code):
    pwrite = FailingCall(monkeypatch, "pwrite")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2, 3)
        pwrite.fail(code)
        await put(tier, arena, 4)

        assert [await get(tier, allocate, number) for number in (1, 2, 3, 4)] == [False, True, True, True]
        assert tier.statistics().evictions == 1
        assert tier.statistics().bytes == bytes_in(config.root) == 3 * RECORD_BYTES


async def test_a_disk_that_stays_full_drops_the_chunk_and_stores_it_later(
    config, arena, allocate, monkeypatch
):
    pwrite = FailingCall(monkeypatch, "pwrite")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        for number in (2, 3, 2, 3):
            pwrite.fail(errno.ENOSPC, times=2)
            with record(arena, number) as buffer, pytest.raises(TierFullError, match="No space") as caught:
                await tier.put(key_of(number), buffer)
            assert isinstance(caught.value.__cause__, OSError)
            pwrite.times = 0
            assert tier.statistics().bytes == bytes_in(config.root)
        await put(tier, arena, 2, 3)

        assert await get(tier, allocate, 2)
        assert await get(tier, allocate, 3)
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES


@pytest.mark.parametrize("call", ["open", "pwrite", "utime", "replace"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE, errno.EFBIG])
async def test_a_write_that_fails_leaves_nothing_and_says_where(
    config, arena, allocate, monkeypatch, call, code
):
    failing = FailingCall(monkeypatch, call)
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        failing.fail(code, times=3)
        with record(arena, 2) as buffer, pytest.raises(TierUnavailableError, match=key_of(2).hex()) as caught:
            await tier.put(key_of(2), buffer)
        failing.times = 0

        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.retryable
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES
        await put(tier, arena, 2)
        assert await get(tier, allocate, 2)


async def test_a_record_is_not_stored_before_its_name_and_that_of_its_folder_are_durable(
    config, arena, monkeypatch
):
    real, failures, synced = os.fsync, [1, 2], set()

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if failures and stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EIO, f"failure {failures.pop()}")
        real(descriptor)
        synced.add(status.st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    async with DiskTier(config.model_copy(update={"fsync": True})) as tier:
        while failures:
            with pytest.raises(TierUnavailableError, match="failure"):
                await put(tier, arena, 1)
            assert files_in(config.root) == []
        await put(tier, arena, 1)

        record_path = path_of(config, 1)
        assert {path.stat().st_ino for path in (record_path, record_path.parent, config.root)} <= synced
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES

        synced.clear()
        shutil.rmtree(record_path.parent)
        await put(tier, arena, 2)  # its folder is made again
        assert config.root.stat().st_ino in synced


async def test_an_error_at_the_close_of_a_folder_does_not_matter(config, arena, allocate, monkeypatch):
    """The record is published then, so its bytes must be counted."""
    real = os.close

    def close(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        real(descriptor)
        if is_folder:
            raise OSError(errno.EIO, "failure")

    async with DiskTier(config.model_copy(update={"fsync": True})) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close)
            await put(tier, arena, 1)
            assert await get(tier, allocate, 1)
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES


async def test_a_record_that_is_not_durable_and_cannot_be_deleted_is_deleted_before_the_next_write(
    config, arena, monkeypatch
):
    real, failures = os.fsync, [1]

    def sync(descriptor: int) -> None:
        if failures and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, f"failure {failures.pop()}")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    unlink = FailingCall(monkeypatch, "unlink")
    async with DiskTier(config.model_copy(update={"fsync": True})) as tier:
        unlink.fail(errno.EROFS, times=4)
        with pytest.raises(TierUnavailableError, match="cannot write"):
            await put(tier, arena, 1)
        with pytest.raises(TierUnavailableError, match="Read-only"):
            await put(tier, arena, 2)
        assert files_in(config.root) == [path_of(config, 1)]
        assert tier.statistics().bytes == RECORD_BYTES
        assert not await tier.contains(key_of(1))
        await put(tier, arena, 2)

        assert files_in(config.root) == [path_of(config, 2)]
        assert tier.statistics().bytes == RECORD_BYTES


async def test_an_undeletable_file_of_a_failed_write_is_deleted_before_the_next_write(
    config, arena, monkeypatch
):
    write, unlink = FailingCall(monkeypatch, "pwrite"), FailingCall(monkeypatch, "unlink")
    async with DiskTier(config) as tier:
        write.fail(errno.EIO)
        unlink.fail(errno.EIO, times=2)
        for _ in range(2):
            with pytest.raises(TierUnavailableError, match="Input/output error"):
                await put(tier, arena, 1)
            assert len(files_in(config.root)) == 1
        await put(tier, arena, 2)

        assert files_in(config.root) == [path_of(config, 2)]


async def test_a_read_that_fails_is_an_error_and_the_chunk_stays(config, arena, allocate, monkeypatch):
    preadv = FailingCall(monkeypatch, "preadv")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        preadv.fail(errno.EIO)
        with pytest.raises(TierUnavailableError, match="Input/output"):
            await tier.get(key_of(1), allocate)
        preadv.fail(errno.EIO)
        results = await tier.get_many([key_of(1), key_of(2)], allocate)

        assert sorted(type(result).__name__ for result in results) == ["Buffer", "TierUnavailableError"]
        for result in results:
            if isinstance(result, Buffer):
                result.release()
        assert await get(tier, allocate, 1)
        assert tier.statistics().corrupt == 0


async def test_victims_that_cannot_be_deleted_stay_counted(config, arena, allocate, monkeypatch):
    config = config.model_copy(update={"max_bytes": 2 * RECORD_BYTES})
    unlink = FailingCall(monkeypatch, "unlink")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        unlink.fail(errno.EROFS)
        with record(arena, 3) as buffer, pytest.raises(TierUnavailableError):
            await tier.put(key_of(3), buffer)
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES
        assert tier.statistics().evictions == 0
        unlink.fail(errno.EROFS)
        with pytest.raises(TierUnavailableError, match="delete"):
            await tier.remove(key_of(1))
        assert await get(tier, allocate, 1)

        await put(tier, arena, 3)
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES


async def test_a_batch_ends_if_there_is_no_memory_for_a_record(config, arena):
    async with DiskTier(config.model_copy(update={"io_threads": 1})) as tier:
        await put(tier, arena, *range(6))
        asked = []

        async def scarce(nbytes: int) -> Buffer:
            asked.append(nbytes)
            if len(asked) > 2:
                raise BudgetExceededError("no slab came free")
            return await arena.lease(nbytes, timeout_s=5)

        results = await tier.get_many([key_of(number) for number in range(6)], scarce)

        assert [type(result) for result in results[:2]] == [Buffer, Buffer]
        assert all(result is None or isinstance(result, TierError) for result in results[2:])
        assert len(asked) <= 4
        for result in results[:2]:
            result.release()
        with pytest.raises(BudgetExceededError):
            await tier.get(key_of(0), scarce)


async def test_a_path_that_is_a_file_is_an_error_with_its_name(tmp_path):
    (tmp_path / "kv").write_text("")
    with pytest.raises(TierUnavailableError, match=str(tmp_path / "kv")):
        await DiskTier(DiskConfig(path=tmp_path / "kv", max_bytes=1 << 20)).__aenter__()


async def test_a_cancelled_put_ends_with_its_thread_and_its_records_stay(
    config, arena, allocate, monkeypatch
):
    gate = gate_of(monkeypatch, "pwrite")
    async with DiskTier(config) as tier:
        buffer = record(arena, 1)
        gate.shut()
        task = asyncio.ensure_future(tier.put(key_of(1), buffer))
        second = asyncio.ensure_future(tier.put(key_of(1), buffer))
        await gate.reached()
        task.cancel()
        await turns()
        task.cancel()
        await turns()
        assert not task.done()
        assert not second.done()
        gate.open()

        with pytest.raises(asyncio.CancelledError):
            await task
        await second
        buffer.release()
        assert gate.calls == 1
        assert await get(tier, allocate, 1)
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES


async def test_a_cancelled_put_that_no_thread_has_begun_writes_nothing(config, arena, monkeypatch):
    gate = gate_of(monkeypatch, "pwrite")
    config = config.model_copy(update={"io_threads": 1, "max_bytes": 2 * RECORD_BYTES})
    async with DiskTier(config) as tier:
        first, second = record(arena, 1), record(arena, 2)
        gate.shut()
        running = asyncio.ensure_future(tier.put(key_of(1), first))
        await gate.reached()
        waiting = asyncio.ensure_future(tier.put(key_of(2), second))
        await turns()
        assert tier.statistics().bytes == 2 * RECORD_BYTES
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert tier.statistics().bytes == RECORD_BYTES
        gate.open()
        await running
        first.release()
        second.release()

        assert gate.calls == 1
        assert not await tier.contains(key_of(2))
        assert tier.statistics().bytes == bytes_in(config.root) == RECORD_BYTES


async def test_a_cancelled_get_keeps_its_buffer_until_the_thread_has_ended(
    config, arena, allocate, monkeypatch
):
    gate = gate_of(monkeypatch, "preadv")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2, 3)
        for call in (
            tier.get(key_of(1), allocate),
            tier.get_many([key_of(number) for number in (1, 2, 3)], allocate),
        ):
            gate.shut()
            task = asyncio.ensure_future(call)
            await gate.reached()
            task.cancel()
            await turns()
            assert not task.done()
            assert arena.statistics().leased_slabs > 0
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert arena.statistics().leased_slabs == 0


async def test_a_cancelled_get_releases_the_buffers_that_no_thread_reads_at_once(
    config, arena, allocate, monkeypatch
):
    gate = gate_of(monkeypatch, "preadv")
    async with DiskTier(config.model_copy(update={"io_threads": 1})) as tier:
        await put(tier, arena, *range(6))
        gate.shut()
        task = asyncio.ensure_future(tier.get_many([key_of(number) for number in range(6)], allocate))
        await gate.reached()
        task.cancel()
        await turns()
        assert arena.statistics().leased_slabs == 1
        assert not task.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert arena.statistics().leased_slabs == 0


async def test_a_chunk_being_read_is_not_evicted_and_survives_its_removal(
    config, arena, allocate, monkeypatch
):
    gate = gate_of(monkeypatch, "preadv")
    async with DiskTier(config.model_copy(update={"max_bytes": RECORD_BYTES})) as tier:
        await put(tier, arena, 1)
        gate.shut()
        reader = asyncio.ensure_future(get(tier, allocate, 1))
        await gate.reached()
        with record(arena, 2) as buffer, pytest.raises(TierFullError, match="in use"):
            await tier.put(key_of(2), buffer)
        assert await tier.remove(key_of(1))
        await put(tier, arena, 2)
        gate.open()

        assert await reader
        assert await get(tier, allocate, 2)


async def test_a_file_system_without_direct_io_is_detected(config, arena, allocate, monkeypatch):
    real = os.open

    def refuse(path: object, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_files.os, "open", refuse)
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        assert await get(tier, allocate, 1)
    with pytest.raises(ConfigError, match="odirect"):
        await DiskTier(config.model_copy(update={"odirect": True})).__aenter__()
    async with DiskTier(config) as tier:  # the refused open has released the lock
        assert await get(tier, allocate, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("odirect", ["auto", True])
async def test_a_directory_without_room_for_a_trial_opens(
    config, arena, allocate, monkeypatch, odirect, code
):
    config = config.model_copy(update={"odirect": odirect})
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)

    FailingCall(monkeypatch, "pwrite").fail(code, times=1_000_000)
    async with DiskTier(config) as tier:
        assert await get(tier, allocate, 1)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/var/kv", "/var/kv"),
        ("file:///var/my%20kv", "/var/my kv"),
        ("file://localhost/var/kv", "/var/kv"),
        (" relative/kv ", "relative/kv"),
    ],
)
def test_paths_are_plain_or_file_urls(text, path):
    assert DiskConfig.model_validate({"path": text, "max_bytes": "1GiB"}).root == Path(path)
