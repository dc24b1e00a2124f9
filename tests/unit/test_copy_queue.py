"""Copies by threads that never take the GIL."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading

import numpy as np
import pytest

from lmcache_async.errors import EngineClosedError
from lmcache_async.memory import copies
from lmcache_async.memory.copies import CopyQueue, RowCopy
from lmcache_async.memory.threads import ThreadStartError
from lmcache_async.testing.steps import turns
from tests.support.processes import open_fds

pytestmark = pytest.mark.skipif(copies.compiled is None, reason="the compiled module is not installed")

ROW = 24


class Batch:
    """Pieces of several payloads and memories, and what the copy is expected to write."""

    def __init__(self, dice: np.random.Generator, *, to_payload: bool) -> None:
        self.pieces: list[RowCopy] = []
        self.targets: list[np.ndarray] = []
        self.expected: list[np.ndarray] = []
        for _ in range(dice.integers(0, 6)):
            count = int(dice.integers(0, 40))
            memory = dice.integers(0, 256, 60 * ROW + 5, np.uint8)
            payload = dice.integers(0, 256, count * ROW, np.uint8)
            starts = dice.permutation(60)[:count].astype(np.int64) * ROW + 5
            starts[dice.random(count) < 0.2] = -1
            target = payload if to_payload else memory
            expected = target.copy()
            for row, start in enumerate(starts.tolist()):
                if start >= 0:
                    place, there = slice(row * ROW, row * ROW + ROW), slice(start, start + ROW)
                    if to_payload:
                        expected[place] = memory[there]
                    else:
                        expected[there] = payload[place]
            self.pieces.append((memory, starts, payload, ROW))
            self.targets.append(target)
            self.expected.append(expected)

    def check(self) -> None:
        assert all(map(np.array_equal, self.targets, self.expected))


def one_row() -> tuple[bytearray, RowCopy]:
    """Return a target of one row, and the piece that copies ones to it."""
    target = bytearray(ROW)
    piece = (np.ones(ROW, np.uint8), np.zeros(1, np.int64), target, ROW)
    return target, piece  # type: ignore[return-value]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("to_payload", [False, True])
async def test_all_rows_of_many_batches_are_copied_and_no_other_byte_is_written(threads, to_payload):
    dice = np.random.default_rng(threads)
    queue = CopyQueue(threads, "copies")

    async def copy(batch: Batch) -> None:
        await queue.copy(batch.pieces, to_payload=to_payload, stream=bool(dice.integers(2)))
        batch.check()

    await asyncio.gather(*(copy(Batch(dice, to_payload=to_payload)) for _ in range(300)))
    queue.close()


def test_a_queue_serves_one_event_loop_after_another():
    queue = CopyQueue(2, "copies")
    for _ in range(3):
        target, piece = one_row()
        asyncio.run(queue.copy([piece], to_payload=True, stream=False))
        assert target == b"\1" * ROW
    queue.close()


def test_a_copy_of_an_event_loop_that_was_closed_does_not_disturb_the_next_one(monkeypatch):
    queue = CopyQueue(1, "copies")
    target, piece = one_row()
    other, other_piece = one_row()
    errors: list[object] = []

    async def begin() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(queue, "_missing", 0)  # no thread
            queue.copy([piece], to_payload=True, stream=False).send(None)

    async def copy() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await queue.copy([other_piece], to_payload=True, stream=False)
        await turns(5)

    for run in (begin, copy):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(run())
        loop.close()
    queue.close()

    assert target == other == b"\1" * ROW
    assert not errors


async def test_a_cancelled_copy_that_no_thread_has_begun_is_withdrawn(monkeypatch):
    queue = CopyQueue(2, "copies")
    monkeypatch.setattr(queue, "_missing", 0)  # no thread
    target, piece = one_row()
    other, other_piece = one_row()
    copying = asyncio.ensure_future(queue.copy([piece, piece], to_payload=True, stream=False))
    waiting = asyncio.ensure_future(queue.copy([other_piece], to_payload=True, stream=False))
    await turns(5)

    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    target.append(0)  # BufferError if the queue still referred to it
    with pytest.raises(BufferError):
        other.append(0)

    monkeypatch.setattr(queue, "_missing", 2)
    await queue.copy([], to_payload=True, stream=False)  # starts the threads
    await waiting
    assert target == bytes(ROW + 1)
    assert other == b"\1" * ROW
    queue.close()


async def test_a_cancelled_copy_that_has_begun_is_awaited(monkeypatch):
    queue = CopyQueue(1, "copies")
    monkeypatch.setattr(queue, "_missing", 0)
    monkeypatch.setattr(queue, "_module", Stubborn(copies.compiled))
    target, piece = one_row()
    copying = asyncio.ensure_future(queue.copy([piece], to_payload=True, stream=False))
    await turns(5)

    copying.cancel()
    await turns(5)
    copying.cancel()
    await turns(5)
    assert not copying.done()

    monkeypatch.setattr(queue, "_missing", 1)
    await queue.copy([], to_payload=True, stream=False)
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert target == b"\1" * ROW
    queue.close()


class Stubborn:
    """The compiled module, except that nothing can be withdrawn, as if a thread had begun all pieces."""

    def __init__(self, module: object) -> None:
        self._module = module

    def withdraw(self, queue: object, number: int) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


async def test_a_piece_that_does_not_fit_is_refused_before_a_byte_is_written():
    queue = CopyQueue(1, "copies")
    target, piece = one_row()
    wrong = (np.ones(ROW, np.uint8), np.ones(1, np.int64), bytearray(ROW), ROW)

    with pytest.raises(ValueError, match="ends beyond"):
        await queue.copy([piece, wrong], to_payload=True, stream=False)

    target.append(0)
    assert not any(target)
    queue.close()


async def test_closing_waits_for_all_copies_and_ends_the_threads():
    before = set(threading.enumerate())
    queue = CopyQueue(2, "copies")
    batches = [Batch(np.random.default_rng(seed), to_payload=False) for seed in range(50)]
    copying = [
        asyncio.ensure_future(queue.copy(batch.pieces, to_payload=False, stream=True)) for batch in batches
    ]
    await turns(1)
    queue.close()
    queue.close()

    for batch in batches:
        batch.check()
    assert set(threading.enumerate()) == before
    await asyncio.gather(*copying)


async def test_a_closed_queue_refuses_copies():
    queue = CopyQueue(2, "copies")
    await queue.copy([one_row()[1]], to_payload=True, stream=False)
    queue.close()

    with pytest.raises(EngineClosedError):
        await queue.copy([one_row()[1]], to_payload=True, stream=False)


def _close(queue):
    queue.close()


def _copy(queue):
    with pytest.raises(EngineClosedError):
        asyncio.run(queue.copy([one_row()[1]], to_payload=True, stream=False))


@pytest.mark.parametrize("use", [_close, _copy])
async def test_a_forked_child_cannot_disturb_the_copies_of_its_parent(use):
    queue = CopyQueue(2, "copies")
    await queue.copy([one_row()[1]], to_payload=True, stream=False)

    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            use(queue)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)

    assert status == 0
    target, piece = one_row()
    async with asyncio.timeout(60):
        await queue.copy([piece], to_payload=True, stream=False)
    assert any(target)
    queue.close()


async def test_without_a_thread_a_copy_fails_and_a_later_one_succeeds(monkeypatch):
    queue = CopyQueue(2, "copies")
    target, piece = one_row()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ThreadStartError, match="start new thread"):
            await queue.copy([piece], to_payload=True, stream=False)
    assert not any(target)

    await queue.copy([piece], to_payload=True, stream=False)
    assert all(target)
    queue.close()


async def test_a_forgotten_queue_leaves_no_thread_and_no_descriptor():
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_fds()
    queue = CopyQueue(2, "copies")
    await queue.copy([one_row()[1]], to_payload=True, stream=False)
    started = set(threading.enumerate()) - threads
    assert len(started) == 2

    queue._move_to(None)  # the event loop refers to it
    del queue
    gc.collect()
    for thread in started:
        await asyncio.to_thread(thread.join)

    assert open_fds() == descriptors


def test_a_queue_refuses_descriptors_that_are_closed_or_block():
    reader, writer = os.pipe()
    try:
        with pytest.raises(ValueError, match="must not block"):
            copies.compiled.open_queue(writer)
        with pytest.raises(OverflowError):
            copies.compiled.open_queue(writer + 2**32)
        with pytest.raises(OSError, match="Bad file descriptor"):
            copies.compiled.open_queue(-1)
    finally:
        os.close(reader)
        os.close(writer)


async def test_a_forked_child_can_delete_a_queue():
    queue = CopyQueue(2, "copies")
    await queue.copy([one_row()[1]], to_payload=True, stream=False)  # the threads wait for the next copy
    queue._move_to(None)

    child = os.fork()
    if child == 0:
        signal.alarm(20)
        del queue
        gc.collect()
        os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)

    assert status == 0
    queue.close()
