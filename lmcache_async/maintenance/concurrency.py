"""Bounded concurrency, rate limit and progress of long runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Progress: TypeAlias = Callable[[str, int, int, int], None]
"""Receives the kind of the items, the number done, the total number, and the bytes done."""


def no_progress(*_: object) -> None:
    """Ignore the progress of a run."""


async def for_each(
    what: str,
    items: Sequence[T],
    work: Callable[[T], Awaitable[int]],
    progress: Progress,
    *,
    in_flight: int,
    max_bytes_per_s: int | None = None,
) -> None:
    """Call `work` for each item, in order, with up to `in_flight` calls at a time.

    `work` returns the bytes of its item. The rate of these is limited to `max_bytes_per_s`, averaged over a second.
    If a call fails or the run is cancelled, the other calls are cancelled and awaited.
    """
    left = iter(items)
    loop = asyncio.get_running_loop()
    due = 0.0
    done = done_bytes = 0

    async def worker() -> None:
        nonlocal due, done, done_bytes
        for item in left:
            nbytes = await work(item)
            done, done_bytes = done + 1, done_bytes + nbytes
            progress(what, done, len(items), done_bytes)
            if max_bytes_per_s is not None:
                now = loop.time()
                due = max(due, now - 1) + nbytes / max_bytes_per_s
                await asyncio.sleep(max(0.0, due - now))

    progress(what, 0, len(items), 0)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
