"""One hop to a worker thread that is never abandoned: the buffers it touches stay the caller's until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(executor: Executor, function: Callable[[], T]) -> T:
    """Run `function` on the executor.

    Cancelled, it first waits until the function has really ended, then raises CancelledError.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                continue  # told already; the thread still runs
        if not future.cancelled():
            future.exception()  # looked at, so that asyncio does not warn of it
        raise
