"""Bounded concurrency, rate limit and progress of long runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from lmcache_async.memory.threads import run_shielded

A = TypeVar("A")
T = TypeVar("T")


async def map_in_order(
    items: Iterable[A], work: Callable[[A], Awaitable[T]], *, in_flight: int
) -> AsyncGenerator[T, None]:
    """Yield the result of `work` for each item, in the order of the items.

    Close it with `contextlib.aclosing`. When it is closed or cancelled, running work is cancelled and
    awaited.

    Args:
        items: The items.
        work: Called for each.
        in_flight: Maximum number of results that are being computed or not consumed yet.
    """
    running: deque[asyncio.Future[T]] = deque()
    try:
        for item in items:
            running.append(asyncio.ensure_future(work(item)))
            if len(running) >= in_flight:
                yield await _first(running)
        while running:
            yield await _first(running)
    finally:
        if running:
            await run_shielded(asyncio.sleep(0))  # each task has started, so that its `finally` runs
            for task in running:
                task.cancel()
            await run_shielded(asyncio.gather(*running, return_exceptions=True))


async def _first(running: deque[asyncio.Future[T]]) -> T:
    await asyncio.wait([running[0]])
    return running.popleft().result()


class RateLimit:
    """Limit bytes per second, averaged over about a second; None is no limit."""

    def __init__(self, max_bytes_per_s: int | None) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._due = 0.0

    async def wait(self, nbytes: int) -> None:
        """Add `nbytes` and wait until the average is within the limit."""
        if self._max_bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now - 1) + nbytes / self._max_bytes_per_s
        await asyncio.sleep(max(0.0, self._due - now))


class Meter:
    """Receiver of the progress of a run. The base class ignores it."""

    def begin(self, what: str, *, records: int | None = None, nbytes: int | None = None) -> None:
        """Start a run. The numbers of records and bytes are None if unknown."""

    def advance(self, records: int, nbytes: int) -> None:
        """Count records and bytes that are done."""
