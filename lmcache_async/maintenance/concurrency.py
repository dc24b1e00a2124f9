"""Bounded concurrency, rate limit and progress of long runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Meter:
    """Receiver of the progress of a run. The base class ignores it."""

    def begin(self, what: str, count: int) -> None:
        """Start a run over `count` items."""

    def advance(self, nbytes: int, count: int = 1) -> None:
        """Report items that are done, and their bytes."""


async def for_each(
    what: str,
    items: Sequence[T],
    work: Callable[[T], Awaitable[int]],
    meter: Meter,
    *,
    in_flight: int,
    max_bytes_per_s: int | None = None,
) -> None:
    """Call `work` for each item, in order, with up to `in_flight` calls at a time.

    `work` returns the bytes of an item, whose rate is limited to `max_bytes_per_s` on average over about a second.
    If a call fails or the run is cancelled, the other calls are cancelled and awaited.
    """
    left = iter(items)
    loop = asyncio.get_running_loop()
    due = 0.0

    async def worker() -> None:
        nonlocal due
        for item in left:
            nbytes = await work(item)
            meter.advance(nbytes)
            if max_bytes_per_s is not None:
                now = loop.time()
                due = max(due, now - 1) + nbytes / max_bytes_per_s
                await asyncio.sleep(max(0.0, due - now))

    meter.begin(what, len(items))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
