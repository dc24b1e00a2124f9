"""Several pieces of work under way at a time, and the rate and the state that go with a long run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from lmcache_async.memory.threads import see_through

A = TypeVar("A")
T = TypeVar("T")


async def in_order(
    items: AsyncIterator[A],
    work: Callable[[A], Awaitable[T]],
    *,
    in_flight: int,
    discard: Callable[[T], None] = lambda _: None,
) -> AsyncGenerator[T, None]:
    """What the work comes to for each item, in their order; so many at most are under way or waiting.

    To be closed (`contextlib.aclosing`): then, and when it is cancelled, what is under way is cancelled and
    awaited, and `discard` is given what nobody took.
    """
    running: deque[asyncio.Future[T]] = deque()
    try:
        async for item in items:
            running.append(asyncio.ensure_future(work(item)))
            if len(running) >= in_flight:
                yield await _next(running)
        while running:
            yield await _next(running)
    finally:
        if running:
            await see_through(asyncio.sleep(0))  # each has begun, so that its own `finally` is run
            for task in running:
                task.cancel()
            for result in await see_through(asyncio.gather(*running, return_exceptions=True)):
                if not isinstance(result, BaseException):
                    discard(result)


async def _next(running: deque[asyncio.Future[T]]) -> T:
    """The result of the first, which stays there until it is taken: cancelled meanwhile, it is not lost."""
    await asyncio.wait([running[0]])
    return running.popleft().result()


async def each(items: Iterable[A]) -> AsyncIterator[A]:
    for item in items:
        yield item


class RateLimit:
    """So many bytes a second, over seconds and not over records; None is as fast as it goes."""

    def __init__(self, max_bytes_per_s: int | None) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._due = 0.0

    async def wait(self, nbytes: int) -> None:
        """Before more is begun after so many bytes."""
        if self._max_bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now - 1) + nbytes / self._max_bytes_per_s
        await asyncio.sleep(max(0.0, self._due - now))


class Meter:
    """Told how far a long run is; this one tells nobody."""

    def begin(self, what: str, *, records: int | None = None, nbytes: int | None = None) -> None:
        """So many are to be done, as far as that is known."""

    def advance(self, records: int, nbytes: int) -> None:
        """So many more are done."""
