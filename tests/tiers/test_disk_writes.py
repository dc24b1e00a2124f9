"""Writes into a full directory of the disk tier: eviction runs concurrently, and counts match the directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator

import aiofiles.os
import pytest

from lmcache_async.errors import TierClosedError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import index as disk_index
from lmcache_async.plugins.disk.files import DiskThreads, RecordFiles
from lmcache_async.testing.records import key_of, record
from tests.support.gates import Gate
from tests.tiers.disk_tools import RECORD_BYTES, FailingCall, bytes_in, gate_of, get, put, turns


@pytest.fixture
def config(config):
    """A config with room for two records, and one thread for writes."""
    return config.model_copy(update={"io_threads": 1, "max_bytes": 2 * RECORD_BYTES})


@contextlib.asynccontextmanager
async def put_that_waits_for_room(
    config: DiskConfig, arena: Arena, gate: Gate
) -> AsyncIterator[tuple[DiskTier, asyncio.Task[None]]]:
    """Fill a tier and start a put of record 3, whose victim is being deleted while the gate is shut."""
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        with record(arena, 3) as buffer:
            gate.shut()
            task = asyncio.create_task(tier.put(key_of(3), buffer))
            await gate.reached()
            yield tier, task
            gate.open()
            await asyncio.wait([task])
        assert tier.statistics().bytes == bytes_in(config.root)
        assert arena.statistics().leased_slabs == 0


async def test_while_room_is_made_for_one_record_others_are_read(config, arena, allocate, monkeypatch):
    gate = gate_of(monkeypatch, "unlink")
    async with put_that_waits_for_room(config, arena, gate) as (tier, task):
        assert await get(tier, allocate, 2)  # in the only thread, which also writes
        assert not await tier.contains(key_of(1))
        assert not task.done()
        gate.open()
        await task
        assert await get(tier, allocate, 3)
        assert tier.statistics().evictions == 1


async def test_a_put_cancelled_while_room_is_made_waits_for_the_deletions_end(
    config, arena, allocate, monkeypatch
):
    gate = gate_of(monkeypatch, "unlink")
    async with put_that_waits_for_room(config, arena, gate) as (tier, task):
        task.cancel()
        await turns()
        assert not task.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await tier.contains(key_of(1))
        assert not await tier.contains(key_of(3))
        assert await get(tier, allocate, 2)
        assert tier.statistics().evictions == 1


async def test_a_put_cancelled_before_its_room_is_made_deletes_nothing(config, arena, allocate, monkeypatch):
    gate = gate_of(monkeypatch, "unlink")
    async with put_that_waits_for_room(config, arena, gate) as (tier, first):
        with record(arena, 4) as buffer:
            second = asyncio.create_task(tier.put(key_of(4), buffer))
            await turns()
            assert not await tier.contains(key_of(2))  # chosen as victim
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        assert await get(tier, allocate, 2)
        gate.open()
        await first
        assert tier.statistics().evictions == 1


async def test_a_put_cancelled_while_a_thread_looks_for_the_record_waits_for_the_threads_end(
    config, arena, allocate, monkeypatch
):
    # Otherwise closing the tier would block the event loop until the thread has ended.
    gate = gate_of(monkeypatch, "stat")
    monkeypatch.setattr(aiofiles.os, "stat", aiofiles.os.wrap(os.stat))
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        with record(arena, 1) as buffer:
            gate.shut()
            task = asyncio.create_task(tier.put(key_of(1), buffer))
            await gate.reached()
            task.cancel()
            await turns()
            ended_early = task.done()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not ended_early
        assert await get(tier, allocate, 1)


async def test_after_a_write_that_failed_its_victim_is_gone_and_counted_as_gone(config, arena, monkeypatch):
    gate, replace = gate_of(monkeypatch, "unlink"), FailingCall(monkeypatch, "replace")
    async with put_that_waits_for_room(config, arena, gate) as (tier, task):
        replace.fail(5)
        gate.open()
        with pytest.raises(Exception, match="cannot write"):
            await task
        assert not await tier.contains(key_of(3))
        assert not await tier.contains(key_of(1))
        assert tier.statistics().bytes == RECORD_BYTES


async def test_a_read_does_not_wait_for_a_write_to_set_the_time_of_use(config, arena, allocate, monkeypatch):
    monkeypatch.setattr(disk_index, "STAMP_AGE_NS", -1)  # every read sets it
    gate = gate_of(monkeypatch, "pwrite")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1)
        with record(arena, 2) as buffer:
            gate.shut()
            writing = asyncio.create_task(tier.put(key_of(2), buffer))
            await gate.reached()
            try:
                assert await get(tier, allocate, 1)
                assert not writing.done()
            finally:
                gate.open()
            await writing


async def test_without_a_thread_for_deletions_and_times_of_use_records_are_read_and_writes_are_unavailable(
    config, arena, allocate, monkeypatch
):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        assert await get(tier, allocate, 1)  # starts the thread that reads
        monkeypatch.setattr(disk_index, "STAMP_AGE_NS", -1)  # every read sets the time of use
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            assert await get(tier, allocate, 1)
            with (
                record(arena, 3) as buffer,
                pytest.raises(TierUnavailableError, match="can't start new thread"),
            ):
                await tier.put(key_of(3), buffer)
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES

        await put(tier, arena, 3)
        assert await get(tier, allocate, 3)


async def test_records_that_no_thread_can_delete_or_look_at_stay_stored(config, arena, allocate, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        for call in (lambda: tier.remove(key_of(1)), tier.clear, lambda: put(tier, arena, 2)):
            with monkeypatch.context() as patch:
                patch.setattr(WorkerPool, "submit", fail)
                with pytest.raises(TierUnavailableError, match="can't start new thread"):
                    await call()
        assert tier.statistics().bytes == bytes_in(config.root) == 2 * RECORD_BYTES
        for number in (1, 2):
            assert await get(tier, allocate, number)


async def test_a_clear_deletes_what_another_one_could_not_delete(config, arena, monkeypatch):
    delete, results = RecordFiles.delete, []

    def delete_or_fail(self, keys):
        return results.pop() if results else delete(self, keys)

    monkeypatch.setattr(RecordFiles, "delete", delete_or_fail)
    gate = Gate(monkeypatch, RecordFiles, "delete")
    async with DiskTier(config) as tier:
        await put(tier, arena, 1, 2)
        results.append((frozenset({key_of(1), key_of(2)}), OSError("not now")))
        gate.shut()
        failing = asyncio.create_task(tier.clear())
        await gate.reached()
        clearing = asyncio.create_task(tier.clear())
        await turns()
        gate.open()

        with pytest.raises(TierUnavailableError, match="not now"):
            await failing
        assert await clearing == 2
        assert tier.statistics().bytes == bytes_in(config.root) == 0


async def test_a_put_waits_for_its_threads_if_a_further_one_cannot_be_started(config, arena, monkeypatch):
    """The running thread reads the records."""
    start, started = DiskThreads.start, []

    def start_one(self, *arguments, **more):
        if started:
            raise TierClosedError("cannot schedule new futures after shutdown")
        started.append(start(self, *arguments, **more))
        return started[0]

    async with DiskTier(config.model_copy(update={"io_threads": 2})) as tier:
        gate = Gate(monkeypatch, RecordFiles, "write")
        monkeypatch.setattr(DiskThreads, "start", start_one)
        with record(arena, 1) as first, record(arena, 2) as second:
            gate.shut()
            task = asyncio.create_task(tier.put_many([(key_of(1), first), (key_of(2), second)]))
            await gate.reached()
            await turns()
            assert not task.done()
            gate.open()
            await task
        assert len(started) == 1
        assert tier.statistics().bytes == bytes_in(config.root)


async def test_a_write_that_raises_an_unexpected_error_stores_nothing_and_is_not_reported_as_stored(
    config, arena, monkeypatch
):
    def fail(*_: object) -> None:
        raise IndexError("not expected")

    monkeypatch.setattr(RecordFiles, "write", fail)
    async with DiskTier(config) as tier:
        records = [(key_of(number), record(arena, number)) for number in (1, 2)]
        with pytest.raises(IndexError, match="not expected"):
            await tier.put_many(records)
        for _, buffer in records:
            buffer.release()
        assert tier.statistics().bytes == bytes_in(config.root) == 0
        assert await tier.contains_many([key for key, _ in records]) == [False, False]
