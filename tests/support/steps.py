"""Cancellation of a call after each number of loop iterations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from lmcache_async.testing.steps import turns


async def cancelled_at_each_step(
    start: Callable[[], Coroutine[Any, Any, Any]],
) -> AsyncIterator[asyncio.Task[Any]]:
    """Run `start()` repeatedly and cancel each run one loop iteration later than the previous one.

    For calls that depend on loop iterations only; for all others see `cancelled_at_each_await`.

    Yields:
        The ended task of each run. The last one ended before its cancellation.
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
