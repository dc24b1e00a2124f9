"""Cancel a call at each of its awaits, one later every time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any

DEADLINE_S = 30.0
"""What a call may take at most, on a busy machine; nothing here waits for it unless something hangs."""


async def turns(count: int) -> None:
    """Let the loop turn so often; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_at_each_step(
    start: Callable[[], Coroutine[Any, Any, Any]],
) -> AsyncIterator[asyncio.Task[Any]]:
    """Tasks of `start()`, each cancelled one loop turn later than the one before; the last has ended by itself.

    For calls that need no other time than the loop's turns; for all others see `cancelled_at_each_await`.
    """
    steps = 0
    ended = False
    while not ended:
        task = asyncio.ensure_future(start())
        await turns(steps)
        ended = task.done()
        task.cancel()
        await asyncio.wait({task})
        yield task
        steps += 1


async def cancelled_at_each_await(
    start: Callable[[int], Coroutine[Any, Any, Any]], *, max_awaits: int = 200
) -> AsyncIterator[asyncio.Task[Any]]:
    """Tasks of `start(0)`, `start(1)`, ...: the n-th cancelled at the n-th await of it or of a task it made.

    The first is cancelled before its first step; the last one has ended by itself, unless it came to
    more than `max_awaits`. What a thread or the network does meanwhile plays no part in the order.

    Raises:
        AssertionError: A cancelled call did not end.
    """
    for number in range(max_awaits + 1):
        counter = _AwaitCounter(number)
        task = await counter.run(start(number))
        yield task
        if counter.awaits < number:
            return


async def cancelled_at_await(call: Coroutine[Any, Any, Any], number: int) -> asyncio.Task[Any]:
    """The task of `call`, ended: cancelled at its await of that number, or by itself before.

    Raises:
        AssertionError: The cancelled call did not end, or went on as if it was not cancelled.
    """
    counter = _AwaitCounter(number)
    task = await counter.run(call)
    swallowed = counter.delivered and not task.cancelled() and task.exception() is None
    assert not swallowed, f"cancelled at await {number}, the call went on to its end as if it was not"
    return task


class _AwaitCounter:
    """Counts the awaits of a call and of all tasks that are made meanwhile; cancels the call at one of them."""

    def __init__(self, cancel_at: int) -> None:
        self.awaits = 0
        self.delivered = False
        self._cancel_at = cancel_at
        self._call: asyncio.Task[Any] | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """The call's task, which has ended."""
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
    """A coroutine that tells each time it gives control back to the loop."""

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
