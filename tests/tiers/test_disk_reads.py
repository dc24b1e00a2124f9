"""Reads of record files in pieces: each record gets its own bytes, older calls are first, memory is released."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import ChunkCorruptError, TierClosedError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.plugins.disk.directory import RecordDirectory
from lmcache_async.plugins.disk.files import (
    DiskThreads,
    ReadBatch,
    RecordFiles,
    RecordReads,
    piece_size,
)
from lmcache_async.testing.records import SLAB_BYTES, key_of, record
from tests.tiers.disk_tools import put

PIECE = 4 * PAGE
WAIT_S = 150.0
THREADS = 4


class Rig:
    """Records of whole pieces in a directory, and reads of them."""

    def __init__(self, root: Path) -> None:
        self.directory = RecordDirectory(root)
        self.directory.open()
        self.files = RecordFiles(self.directory, direct=False, fsync=False)
        self.pool = WorkerPool(THREADS)
        self.reads = RecordReads(self.files, self.pool, THREADS, PIECE)
        self.arena = Arena(1 << 20, 1 << 20, huge_pages=False, prefault=False)

    def add(self, number: int, pieces: int) -> bytes:
        with record(self.arena, number, pieces * PIECE - PAGE) as buffer:
            content = bytes(buffer.padded_view)
            assert self.files.write(key_of(number), buffer.padded_view, 0) is None
        return content

    def start(self, batch: ReadBatch, number: int, nbytes: int) -> memoryview:
        memory = memoryview(bytearray(nbytes))
        self.reads.start(batch, number, key_of(number), memory)
        return memory

    async def end(self, *batches: ReadBatch) -> dict[int, int | Exception]:
        async with asyncio.timeout(WAIT_S):
            for batch in batches:
                self.reads.close_batch(batch)
                await batch.ended
        return {number: outcome for batch in batches for number, outcome in batch.outcomes.items()}

    def close(self) -> None:
        self.pool.shutdown()
        self.directory.close()
        self.arena.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


class Log:
    """Pieces read, in order, as record number and offset. Reads block while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.opened = threading.Event()
        self.begun = threading.Semaphore(0)
        self.fail: Callable[[int, int], None] = lambda number, offset: None
        numbers: dict[int, int] = {}
        open_file, read_all = rig.files.open, disk_files.read_all

        def note_number(key: bytes, nbytes: int) -> int:
            descriptor = open_file(key, nbytes)  # type: ignore[arg-type]
            numbers[descriptor] = int.from_bytes(key, "big")
            return descriptor

        def note_piece(descriptor: int, view: memoryview, offset: int = 0) -> int:
            number = numbers[descriptor]
            self.pieces.append((number, offset // PIECE))
            self.begun.release()
            assert self.opened.wait(WAIT_S)
            self.fail(number, offset // PIECE)
            return read_all(descriptor, view, offset)

        monkeypatch.setattr(rig.files, "open", note_number)
        monkeypatch.setattr(disk_files, "read_all", note_piece)

    async def wait(self, pieces: int) -> None:
        for _ in range(pieces):
            assert await asyncio.to_thread(self.begun.acquire, timeout=WAIT_S)


@given(nbytes=st.integers(0, 64 << 20), about=st.integers(1, 1024).map(lambda pages: pages * PAGE))
def test_pieces_are_whole_pages_and_nearly_equal(nbytes, about):
    piece = piece_size(nbytes, about)

    assert piece % PAGE == 0
    assert PAGE <= piece <= max(1.5 * about + PAGE, PAGE)
    assert -(-nbytes // piece) <= max(nbytes // about + 1, 1)
    if nbytes >= about:
        assert piece > about / 2


@pytest.mark.parametrize(("payload", "count"), [(2 << 20, 1), (8 << 20, 4), (16 << 20, 8), (3 << 20, 2)])
def test_the_page_of_a_record_s_header_is_not_a_piece_of_its_own(payload, count):
    piece = piece_size(payload + PAGE, 2 << 20)

    assert -(-(payload + PAGE) // piece) == count


async def test_each_record_gets_its_own_bytes(rig):
    batches = [rig.reads.open_batch() for _ in range(2)]
    content = {number: rig.add(number, 1 + number % 4) for number in range(12)}
    memory = {
        number: rig.start(batches[number % 2], number, len(content[number])) for number in reversed(range(12))
    }

    outcomes = await rig.end(*batches)

    assert all(0 < outcomes[number] <= len(content[number]) for number in range(12))
    assert {number: bytes(view) for number, view in memory.items()} == content


async def test_a_file_that_is_truncated_while_it_is_read_is_corrupt(rig, monkeypatch):
    log = Log(monkeypatch, rig)
    batch = rig.reads.open_batch()
    nbytes = len(rig.add(1, 6))
    rig.start(batch, 1, nbytes)
    await log.wait(THREADS)
    path = rig.directory.root / rig.directory.record_name(key_of(1))
    path.write_bytes(path.read_bytes()[: 2 * PIECE + 100])
    log.opened.set()

    outcome = (await rig.end(batch))[1]

    assert isinstance(outcome, ChunkCorruptError)
    assert f"{2 * PIECE + 100} bytes were read of {nbytes}" in str(outcome)


async def test_one_record_is_read_by_all_threads_and_by_no_more(rig, monkeypatch):
    log = Log(monkeypatch, rig)
    batch = rig.reads.open_batch()
    nbytes = len(rig.add(1, 8))
    rig.add(2, 8)

    rig.start(batch, 1, nbytes)
    await log.wait(THREADS)
    rig.start(batch, 2, nbytes)
    begun = sorted(log.pieces)
    log.opened.set()

    assert len(await rig.end(batch)) == 2
    assert begun == [(1, piece) for piece in range(THREADS)]
    assert sorted(log.pieces) == [(number, piece) for number in (1, 2) for piece in range(8)]


async def test_records_of_the_oldest_call_are_read_first(rig, monkeypatch):
    log = Log(monkeypatch, rig)
    rig.reads = RecordReads(rig.files, rig.pool, 1, PIECE)
    older, newer = rig.reads.open_batch(), rig.reads.open_batch()
    nbytes = [len(rig.add(number, 3)) for number in range(4)]

    rig.start(newer, 0, nbytes[0])
    await log.wait(1)
    for batch, number in ((newer, 1), (older, 2), (older, 3)):
        rig.start(batch, number, nbytes[number])
    log.opened.set()
    await rig.end(older, newer)

    assert [number for number, _ in log.pieces] == [0, 2, 2, 2, 3, 3, 3, 0, 0, 1, 1, 1]


async def test_one_thread_reads_all_pieces_if_no_other_can_be_started(rig, monkeypatch):
    submit, batch = rig.pool.submit, rig.reads.open_batch()
    content = rig.add(1, 5)

    def submit_from_the_loop(call: Callable[..., object], *args: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("can't start new thread")
        return submit(call, *args)

    monkeypatch.setattr(rig.pool, "submit", submit_from_the_loop)
    memory = rig.start(batch, 1, len(content))

    assert isinstance((await rig.end(batch))[1], int)
    assert bytes(memory) == content


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError("none left")])
async def test_an_error_is_that_of_its_own_record_whichever_thread_reads_it(rig, monkeypatch, error):
    log = Log(monkeypatch, rig)
    batch = rig.reads.open_batch()
    nbytes = len(rig.add(1, 6))
    rig.add(2, 6)

    def fail(number: int, piece: int) -> None:
        if number == 1 and piece >= 2:
            raise error

    log.fail = fail
    log.opened.set()
    for number in (1, 2):
        rig.start(batch, number, nbytes)
    outcomes = await rig.end(batch)

    assert outcomes[1] is error
    assert isinstance(outcomes[2], int)


async def test_a_file_that_cannot_be_closed_is_an_error_of_its_read(rig, monkeypatch):
    close, batch = os.close, rig.reads.open_batch()
    nbytes = len(rig.add(1, 3))

    def fail(descriptor: int) -> None:
        close(descriptor)
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk_files.os, "close", fail)
    rig.start(batch, 1, nbytes)

    assert isinstance((await rig.end(batch))[1], OSError)


async def test_a_read_whose_pieces_cannot_be_planned_has_an_error(rig, monkeypatch):
    def fail(nbytes: int, target: int) -> int:
        raise MemoryError("none left")

    monkeypatch.setattr(disk_files, "piece_size", fail)
    batch = rig.reads.open_batch()
    rig.start(batch, 1, len(rig.add(1, 3)))

    assert isinstance((await rig.end(batch))[1], MemoryError)


async def test_running_threads_read_a_record_for_which_no_other_can_be_started(rig, monkeypatch):
    log, submit = Log(monkeypatch, rig), rig.pool.submit
    calls: list[Future[Any]] = []
    rig.reads = RecordReads(rig.files, rig.pool, 2, PIECE)
    nbytes = [len(rig.add(number, 1 + number)) for number in range(4)]
    fails = False

    def submit_and_fail(call: Callable[..., object], *args: object) -> object:
        calls.append(submit(call, *args))  # as in the standard library: the call stays in the queue
        if fails:
            raise RuntimeError("can't start new thread")
        return calls[-1]

    monkeypatch.setattr(rig.pool, "submit", submit_and_fail)
    batch, later = rig.reads.open_batch(), rig.reads.open_batch()
    rig.start(batch, 0, nbytes[0])
    await log.wait(1)
    fails = True
    rig.start(batch, 1, nbytes[1])
    fails = False
    log.opened.set()
    outcomes = await rig.end(batch)
    await asyncio.gather(*map(asyncio.wrap_future, calls))

    log.opened.clear()
    log.begun = threading.Semaphore(0)
    calls.clear()
    for number in (2, 3):
        rig.start(later, number, nbytes[number])
    await log.wait(2)
    num_threads = len(calls)
    log.opened.set()
    await rig.end(later)

    assert [type(outcome) for outcome in outcomes.values()] == [int, int]
    assert num_threads == 2


async def test_reads_that_no_thread_has_begun_are_withdrawn(rig, monkeypatch):
    log = Log(monkeypatch, rig)
    batch, other = rig.reads.open_batch(), rig.reads.open_batch()
    nbytes = len(rig.add(1, 8))
    rig.add(2, 8)
    rig.add(3, 8)
    rig.start(batch, 1, nbytes)
    await log.wait(THREADS)
    rig.start(batch, 2, nbytes)
    rig.start(other, 3, nbytes)

    assert rig.reads.close_batch(batch, withdraw=True) == [2]
    assert not batch.ended.done()
    log.opened.set()
    assert set(await rig.end(batch, other)) == {1, 3}


async def test_reads_started_before_the_end_are_read(rig):
    threads, batch, blocked = DiskThreads(1), rig.reads.open_batch(), threading.Event()
    rig.reads = RecordReads(rig.files, threads.reads, 1, PIECE)
    nbytes = len(rig.add(1, 3))
    threads.start(blocked.wait, WAIT_S, pool=threads.reads)
    rig.start(batch, 1, nbytes)
    ended = threading.Event()
    threads.close_later(ended.set)
    with contextlib.suppress(TierClosedError):
        while True:  # until it is closed
            threads.start(int, pool=threads.reads)
    blocked.set()

    assert isinstance((await rig.end(batch))[1], int)
    assert await asyncio.to_thread(ended.wait, WAIT_S)


async def test_a_read_after_the_end_is_refused(rig):
    batch = rig.reads.open_batch()
    rig.pool.shutdown()

    with pytest.raises(TierClosedError):
        rig.start(batch, 1, PAGE)
    assert rig.reads.close_batch(batch, withdraw=True) == [1]
    assert batch.ended.done()


@pytest.mark.parametrize("fails", [False, True])
async def test_no_memory_is_held_when_the_reads_have_ended(rig, monkeypatch, fails):
    log = Log(monkeypatch, rig)
    log.opened.set()
    batch = rig.reads.open_batch()
    for number in range(4):
        nbytes = len(rig.add(number, 5))

    def fail(number: int, piece: int) -> None:
        if fails and piece == 3:
            raise OSError(errno.EIO, "broken")

    log.fail = fail
    gc.collect()
    gc.disable()  # nothing may depend on a collection
    try:
        memories = [np.zeros(nbytes, np.uint8) for _ in range(4)]
        gone = [weakref.ref(memory) for memory in memories]
        for number, memory in enumerate(memories):
            rig.reads.start(batch, number, key_of(number), memory.data)
        del memory, memories
        outcomes = await rig.end(batch)
        assert [ref() for ref in gone] == [None] * 4
        assert [isinstance(outcome, OSError) for outcome in outcomes.values()] == [fails] * 4
    finally:
        gc.enable()


async def test_a_batch_is_read_before_the_next_one(tmp_path, allocate, arena, monkeypatch):
    order: list[int] = []
    real = RecordFiles.open

    def note(files: RecordFiles, key: bytes, nbytes: int) -> int:
        order.append(int.from_bytes(key, "big"))
        return real(files, key, nbytes)  # type: ignore[arg-type]

    config = DiskConfig(path=tmp_path, max_bytes=64 * SLAB_BYTES, io_threads=1)
    async with DiskTier(config) as tier:
        await put(tier, arena, *range(12))
        monkeypatch.setattr(RecordFiles, "open", note)
        batches = [[key_of(number) for number in range(*edge)] for edge in pairwise([0, 5, 6, 9, 11, 12])]
        for results in await asyncio.gather(*(tier.get_many(batch, allocate) for batch in batches)):
            for result in results:
                assert isinstance(result, Buffer)
                result.release()

    assert order == list(range(12))
