"""Cancellation of a call at each of its awaits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any

DEADLINE_S = 30.0
"""Deadline of a call in seconds, for a busy machine. It is only reached if a call hangs."""


async def turns(count: int) -> None:
    """Run `count` iterations of the event loop. No time passes in a loop with virtual time."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_at_each_await(
    start: Callable[[int], Coroutine[Any, Any, Any]], *, max_awaits: int = 200
) -> AsyncIterator[asyncio.Task[Any]]:
    """Run `start(0)`, `start(1)`, ... and cancel the n-th run at its n-th await.

    Awaits of tasks that the call creates are counted too. Run 0 is cancelled before its first step. Only the number
    of awaits decides when a run is cancelled, not the time.

    Args:
        start: Makes the call; called with the number of the run.
        max_awaits: Number of the last await to cancel at.

    Yields:
        The ended task of each run. The last one ended before its cancellation, unless the call has more than
        `max_awaits` awaits.

    Raises:
        AssertionError: A cancelled call did not end within DEADLINE_S.
    """
    for number in range(max_awaits + 1):
        counter = _AwaitCounter(number)
        task = await counter.run(start(number))
        yield task
        if counter.awaits < number:
            return


async def cancelled_at_await(call: Coroutine[Any, Any, Any], number: int) -> asyncio.Task[Any]:
    """Run `call` and cancel it at its await of that number; 0 cancels it before its first step.

    Awaits of tasks that the call creates are counted too.

    Returns:
        The ended task. It ended by itself if the call has fewer awaits.

    Raises:
        AssertionError: The cancelled call did not end within DEADLINE_S, or suppressed the cancellation and
            returned a result.
    """
    counter = _AwaitCounter(number)
    task = await counter.run(call)
    swallowed = counter.delivered and not task.cancelled() and task.exception() is None
    assert not swallowed, f"cancelled at await {number}, the call suppressed it and returned"
    return task


class _AwaitCounter:
    """Counts the awaits of a call and of all tasks created meanwhile, and cancels the call at one of them."""

    def __init__(self, cancel_at: int) -> None:
        self.awaits = 0
        self.delivered = False
        self._cancel_at = cancel_at
        self._call: asyncio.Task[Any] | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `coroutine` and return its ended task."""
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        try:
            self._call = task = asyncio.ensure_future(coroutine)
            if self._cancel_at == 0:
                self.delivered = task.cancel()
            _, running = await asyncio.wait({task}, timeout=DEADLINE_S)
        finally:
            loop.set_task_factory(factory)
        assert not running, f"cancelled at await {self._cancel_at}, the call did not end in {DEADLINE_S} s"
        return task

    def note_await(self) -> None:
        self.awaits += 1
        if self.awaits == self._cancel_at and self._call is not None:
            self.delivered = self._call.cancel()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Counted(coroutine, self), loop=loop, **options)


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that notifies the counter each time it suspends."""

    def __init__(self, inner: Coroutine[Any, Any, Any], counter: _AwaitCounter) -> None:
        self._inner = inner
        self._counter = counter

    def send(self, value: Any) -> Any:
        awaited = self._inner.send(value)
        self._counter.note_await()
        return awaited

    def throw(self, *error: Any) -> Any:
        awaited = self._inner.throw(*error)
        self._counter.note_await()
        return awaited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()
