"""Cancel a call at each of its steps, one loop turn later every time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


async def turns(count: int) -> None:
    """Let the loop turn so often; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_at_each_step(start: Callable[[], Awaitable[Any]]) -> AsyncIterator[asyncio.Task[Any]]:
    """Tasks of `start()`, the first cancelled before its first step; the last one has ended by itself.

    For calls that need no other time than the loop's turns.
    """
    for steps in itertools.count():
        task = asyncio.ensure_future(start())
        await turns(steps)
        ended = task.done()
        task.cancel()
        await asyncio.wait({task})
        yield task
        if ended:
            return
