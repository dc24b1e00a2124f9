"""A loop on its own thread: submit from any thread, close once, leave no caller waiting."""

import asyncio
import concurrent.futures
import contextlib
import gc
import threading

import pytest
import uvloop

from lmcache_async.engine import loop as loop_module
from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import EngineClosedError
from tests.support.broken_loop import BrokenLoops

ENDED = (concurrent.futures.CancelledError, EngineClosedError)
LONG_S = 150  # only a hang takes so long


@pytest.fixture
def loop():
    loop = LoopThread("lmcache-async-test-loop")
    yield loop
    loop.close()
    assert not loop._thread.is_alive()


async def answer(value):
    await asyncio.sleep(0)
    return value


class Parked:
    """A coroutine that waits forever, and its outcome."""

    def __init__(self):
        self.started = threading.Event()
        self.ended = []

    async def run(self):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)  # a clean-up that takes one iteration
            self.ended.append("cleaned up")


async def never_ends(started):
    started.set()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def test_results_and_errors_reach_the_caller_from_uvloop_on_the_named_thread(loop):
    async def where():
        return threading.current_thread().name, type(asyncio.get_running_loop())

    async def fail():
        raise ValueError("odd")

    assert loop.submit(where()).result(LONG_S) == ("lmcache-async-test-loop", uvloop.Loop)
    with pytest.raises(ValueError, match="odd"):
        loop.submit(fail()).result(LONG_S)


def test_cancelling_the_future_cancels_the_coroutine(loop):
    parked = Parked()
    future = loop.submit(parked.run())
    parked.started.wait(LONG_S)
    future.cancel()

    while len(parked.ended) < 2:
        loop.submit(answer(None)).result(LONG_S)
    assert parked.ended == ["cancelled", "cleaned up"]


def test_functions_are_called_on_the_loops_thread_in_order(loop):
    calls, done = [], threading.Event()
    for number in range(5):
        loop.call_soon(lambda n: calls.append((n, threading.current_thread())), number)
    loop.call_soon(done.set)

    assert done.wait(LONG_S)
    assert calls == [(number, loop._thread) for number in range(5)]


def test_closing_cancels_running_tasks_and_waits_for_their_clean_up():
    parked = Parked()
    with contextlib.closing(LoopThread()) as loop:
        future = loop.submit(parked.run())
        parked.started.wait(LONG_S)

    assert parked.ended == ["cancelled", "cleaned up"]
    with pytest.raises(ENDED):
        future.result(LONG_S)
    assert not loop._thread.is_alive()


def test_closing_also_ends_tasks_that_a_clean_up_starts():
    loop, late = LoopThread(), Parked()

    async def starts_another():
        try:
            await asyncio.Event().wait()
        finally:
            tasks.append(asyncio.ensure_future(late.run()))

    tasks = []
    loop.submit(starts_another())
    loop.submit(answer(None)).result(LONG_S)
    loop.close()

    assert tasks[0].done()


def test_waiters_for_a_task_that_does_not_end_are_released():
    loop, inside = LoopThread(), threading.Event()
    future = loop.submit(never_ends(inside))
    inside.wait(LONG_S)
    loop.close(timeout_s=0.01)

    with pytest.raises(ENDED):
        future.result(LONG_S)
    loop._thread.join(LONG_S)
    assert not loop._thread.is_alive()
    del future
    gc.collect()  # asyncio reports the pending task here, not at interpreter exit


def test_a_close_that_is_interrupted_ends_the_thread_and_can_be_repeated(monkeypatch):
    loop = LoopThread()

    def interrupted(future, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.close()
    loop.close(LONG_S)

    assert not loop._thread.is_alive()


def test_a_closed_loop_raises_and_closes_the_coroutine():
    loop = LoopThread()
    loop.close()
    loop.close()
    coroutine = answer(1)

    with pytest.raises(EngineClosedError):
        loop.submit(coroutine)
    with pytest.raises(EngineClosedError):
        loop.call_soon(print)
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        coroutine.send(None)


def test_a_submit_that_meets_the_closing_ends(monkeypatch):
    """The close comes after the submit has seen an open loop, and before the coroutine is on it."""
    loop, real = LoopThread(), asyncio.run_coroutine_threadsafe
    closers = []

    def meets_closing(coroutine, inner):
        if not closers:
            closers.append(threading.Thread(target=loop.close))
            closers[0].start()
            closers[0].join(0.1)  # as far as it gets; it may have to wait for this thread
        return real(coroutine, inner)

    monkeypatch.setattr(loop_module.asyncio, "run_coroutine_threadsafe", meets_closing)
    with pytest.raises(ENDED):
        loop.submit(Parked().run()).result(LONG_S)
    closers[0].join(LONG_S)
    assert not loop._thread.is_alive()


def test_submits_of_many_threads_during_the_closing_all_end():
    for _ in range(5):
        loop, ends = LoopThread(), []
        start = threading.Barrier(5)

        def submit_until_closed(loop=loop, ends=ends, start=start):
            start.wait(LONG_S)
            try:
                while loop.submit(answer(1)).result(LONG_S) == 1:
                    pass
            except ENDED:
                ends.append(True)

        threads = [threading.Thread(target=submit_until_closed) for _ in range(4)]
        for thread in threads:
            thread.start()
        start.wait(LONG_S)
        loop.submit(answer(1)).result(LONG_S)
        loop.close()
        for thread in threads:
            thread.join(LONG_S)

        assert len(ends) == 4


async def exit_in_task():
    raise SystemExit(1)


def interrupt():
    raise KeyboardInterrupt


async def stop():
    asyncio.get_running_loop().stop()


async def exit_in_another_task():
    await asyncio.ensure_future(exit_in_task())


async def interrupt_in_a_callback():
    asyncio.get_running_loop().call_soon(interrupt)


@pytest.mark.parametrize("end", [stop, exit_in_another_task, interrupt_in_a_callback])
def test_no_task_or_callback_ends_the_loop(loop, caplog, end):
    parked = Parked()
    waiting = loop.submit(parked.run())
    parked.started.wait(LONG_S)
    for number in range(3):
        loop.submit(end())
        assert loop.submit(answer(number)).result(LONG_S) == number

    assert not waiting.done()
    assert "the event loop continues" in caplog.text
    assert loop._thread.is_alive()


@pytest.fixture
def broken(monkeypatch):
    return BrokenLoops(monkeypatch)


def test_a_thread_that_ends_by_itself_fails_pending_and_later_calls_at_once(broken, caplog):
    loop, parked = LoopThread(), Parked()
    waiting = loop.submit(parked.run())
    parked.started.wait(LONG_S)

    broken.break_one(loop.call_soon)

    with pytest.raises(ENDED):
        waiting.result(LONG_S)
    assert parked.ended == ["cancelled", "cleaned up"]
    for call in (lambda: loop.submit(answer(1)), lambda: loop.call_soon(print)):
        with pytest.raises(EngineClosedError, match=r"has ended: OSError: the selector is closed"):
            call()
    assert "every call fails from now on" in caplog.text
    loop.close()
    assert not loop._thread.is_alive()


def test_a_call_that_outlives_the_end_of_the_thread_fails_all_the_same(broken, monkeypatch):
    monkeypatch.setattr(loop_module, "LAST_S", 0.01)
    loop, inside = LoopThread(), threading.Event()
    waiting = loop.submit(never_ends(inside))
    inside.wait(LONG_S)
    broken.break_one(loop.call_soon)

    with pytest.raises(EngineClosedError, match="has ended: OSError"):
        waiting.result(LONG_S)
    loop.close()
    del waiting
    gc.collect()  # as above


def test_an_interrupt_while_the_thread_starts_leaves_no_thread(monkeypatch):
    started = []

    class InterruptedThread(threading.Thread):
        def start(self):
            super().start()
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_async.engine.loop.threading.Thread", InterruptedThread)
    with pytest.raises(KeyboardInterrupt):
        LoopThread()

    started[0].join(10)
    assert not started[0].is_alive()
