"""Calls in threads: waits that outlast every cancellation, and no reference that outlives a call."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from lmcache_async.memory.threads import (
    ThreadStartError,
    WorkerPool,
    in_thread,
    in_threads,
    run_shielded,
    wait_done,
    wait_ended,
)
from lmcache_async.testing.steps import turns


class Gated:
    """A call that blocks its thread until `may_end` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.ended = False
        self._error = error

    def __call__(self) -> str:
        assert self.may_end.wait(60)
        self.ended = True
        if self._error is not None:
            raise self._error
        return "done"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as workers:
        yield workers


async def returning(wait: Coroutine[Any, Any, None]) -> str:
    await wait
    return "done"


async def until_running(call: Future[str]) -> None:
    while not call.running():
        await turns(1)


async def cancelled_often(task: asyncio.Task[str]) -> None:
    for _ in range(3):
        task.cancel()
        await turns(5)


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_running_threads_take_a_call_for_which_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with WorkerPool(2) as workers:
        gated = Gated()
        first = workers.submit(gated)
        monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
        second = workers.submit(str, "second")
        gated.may_end.set()

        assert (first.result(60), second.result(60)) == ("done", "second")


def test_a_call_that_is_refused_because_there_is_no_thread_is_not_run_later(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    with monkeypatch.context() as failing:
        failing.setattr(threading.Thread, "start", refuse_to_start)
        with pytest.raises(ThreadStartError, match="can't start"):
            pool.submit(calls.append, "first")
    pool.submit(calls.append, "second").result(60)

    assert calls == ["second"]


async def test_a_call_that_has_begun_is_awaited_if_the_next_one_is_refused(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated, begun = Gated(), []
    submit = pool.submit

    def submit_once(call: Callable[[], str]) -> Future[str]:
        if begun:
            raise RuntimeError("shut down")
        begun.append(submit(call))
        return begun[0]

    monkeypatch.setattr(pool, "submit", submit_once)
    task = asyncio.ensure_future(in_threads(pool, [gated, gated]))
    await turns(1)
    await until_running(begun[0])
    await turns(5)
    is_done = task.done()
    gated.may_end.set()
    with pytest.raises(RuntimeError, match="shut down"):
        await task

    assert not is_done
    assert gated.ended


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")], ids=["returns", "raises"])
async def test_a_cancelled_call_ends_only_after_its_function(
    pool: WorkerPool, error: Exception | None
) -> None:
    call = Gated(error)
    task = asyncio.ensure_future(in_thread(pool, call))
    await turns(2)
    await cancelled_often(task)
    assert not task.done()

    call.may_end.set()
    await asyncio.wait({task})

    assert call.ended
    assert task.cancelled()


async def test_a_deadline_that_expires_during_the_wait_raises_afterwards(pool: WorkerPool) -> None:
    call = Gated()

    async def within_no_time() -> str:
        async with asyncio.timeout(0):
            return await in_thread(pool, call)

    task = asyncio.ensure_future(within_no_time())
    await turns(5)
    assert not task.done()
    call.may_end.set()

    with pytest.raises(TimeoutError):
        await task
    assert call.ended


async def test_run_shielded_waits_for_the_end_of_a_coroutine() -> None:
    proceed = asyncio.Event()
    steps = []

    async def work() -> str:
        await proceed.wait()
        await turns(3)
        steps.append("ended")
        return "done"

    task = asyncio.ensure_future(run_shielded(work()))
    await turns(2)
    await cancelled_often(task)
    assert not task.done()
    proceed.set()
    await asyncio.wait({task})

    assert task.cancelled()
    assert steps == ["ended"]
    assert await run_shielded(work()) == "done"


async def test_run_shielded_ends_when_its_work_is_cancelled() -> None:
    work = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(run_shielded(work))
    await turns(2)
    work.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    await wait_done(work)


async def test_wait_ended_does_not_raise_the_errors_of_the_calls(pool: WorkerPool) -> None:
    failed = pool.submit(lambda: 1 // 0)
    passed = pool.submit(lambda: 7)

    await wait_ended(failed, passed)
    await wait_ended()

    assert isinstance(failed.exception(), ZeroDivisionError)
    assert passed.result() == 7


async def test_a_cancelled_wait_withdraws_queued_calls_and_waits_for_running_ones(pool: WorkerPool) -> None:
    running, queued = Gated(), Gated()
    calls = [pool.submit(running), pool.submit(queued)]
    await until_running(calls[0])
    task = asyncio.ensure_future(returning(wait_ended(*calls)))
    await turns(2)
    await cancelled_often(task)
    assert not task.done()

    running.may_end.set()
    await asyncio.wait({task})

    assert task.cancelled()
    assert running.ended
    assert calls[1].cancelled()
    assert not queued.ended


async def test_an_abandoned_call_is_not_awaited(pool: WorkerPool) -> None:
    call = Gated()
    future = pool.submit(call)
    await until_running(future)
    task = asyncio.ensure_future(returning(wait_ended(future, abandon=True)))
    await turns(2)
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    assert not call.ended
    call.may_end.set()


class Thing:
    """An object that supports weak references."""


def test_arguments_are_gone_when_the_future_is_done(pool):
    gate = threading.Event()
    thing, keyword, closed_over = Thing(), Thing(), Thing()
    watched = [weakref.ref(each) for each in (thing, keyword, closed_over)]
    alive = []

    def call(_, other, held=closed_over):
        return gate.wait(60) and other is not held

    future = pool.submit(call, thing, other=keyword)
    future.add_done_callback(lambda _: alive.extend(ref() is not None for ref in watched))  # on the worker
    del thing, keyword, closed_over, call
    gate.set()

    assert future.result(timeout=60) is True
    pool.shutdown()
    assert alive == [False, False, False]


def test_a_withdrawn_call_holds_nothing(pool):
    gate = threading.Event()
    running = pool.submit(gate.wait, 60)
    thing = Thing()
    watched = weakref.ref(thing)

    waiting = pool.submit(id, thing)
    del thing
    assert watched() is not None
    assert waiting.cancel()
    assert watched() is None

    gate.set()
    assert running.result(timeout=60)


async def test_an_error_does_not_keep_the_function_that_raised_it(pool, collector_off):
    thing = Thing()
    watched = weakref.ref(thing)

    def fail(held=thing):
        raise LookupError(held is not None)

    with pytest.raises(LookupError, match="True"):
        await in_thread(pool, fail)
    del thing, fail
    assert watched() is None
