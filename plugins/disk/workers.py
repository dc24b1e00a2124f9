"""Blocking calls in named threads, never abandoned half way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from lmcache_async.memory.threads import WorkerPool

T = TypeVar("T")


class Workers:
    """A few threads for blocking calls."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.executor = WorkerPool(num_threads, thread_name_prefix=name)

    def start(self, call: Callable[..., T], *args: Any) -> Future[T]:
        return self.executor.submit(call, *args)

    def close(self) -> None:
        """Wait for calls that run; there are none when every `end` has ended."""
        self.executor.shutdown(wait=True)


async def end(future: Future[Any]) -> None:
    """Wait until the call has ended; its outcome is in `future` and is not raised here.

    Cancelled, it takes the call back if no thread has begun it (`future.cancelled()`), or else waits
    for its real end: the memory that it works on is nobody else's before.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell_loop(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under us
            loop.call_soon_threadsafe(tell)

    future.add_done_callback(tell_loop)
    try:
        await asyncio.wait([ended])
    except asyncio.CancelledError:
        if not future.cancel():
            while not ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
        raise
