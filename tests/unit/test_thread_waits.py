"""Memory: what goes on in a thread is waited for until it has really ended, however often its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from lmcache_async.memory.threads import WorkerPool, in_thread, really_ended, see_through
from lmcache_async.testing.steps import turns


class Gated:
    """A call in a thread that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.ended = False
        self._error = error

    def __call__(self) -> str:
        assert self.may_end.wait(30)
        self.ended = True
        if self._error is not None:
            raise self._error
        return "done"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as workers:
        yield workers


async def cancelled_often(task: asyncio.Task[str]) -> None:
    for _ in range(3):
        task.cancel()
        await turns(5)


async def test_what_the_function_returns_or_raises_comes_back(pool: WorkerPool) -> None:
    assert await in_thread(pool, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(pool, lambda: 1 // 0)


@pytest.mark.parametrize("error", [None, OSError("the disk is gone")], ids=["returns", "raises"])
async def test_a_cancelled_call_ends_after_its_thread_and_not_before(
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


async def test_a_deadline_that_passes_meanwhile_is_still_told(pool: WorkerPool) -> None:
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


async def test_a_coroutine_is_seen_through_to_its_end() -> None:
    told = asyncio.Event()
    steps = []

    async def work() -> str:
        await told.wait()
        await turns(3)
        steps.append("ended")
        return "done"

    task = asyncio.ensure_future(see_through(work()))
    await turns(2)
    await cancelled_often(task)
    assert not task.done()
    told.set()
    await asyncio.wait({task})

    assert task.cancelled()
    assert steps == ["ended"]
    assert await see_through(work()) == "done"


async def test_work_that_is_itself_cancelled_is_no_wait() -> None:
    work = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(see_through(work))
    await turns(2)
    work.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    await really_ended(work)
