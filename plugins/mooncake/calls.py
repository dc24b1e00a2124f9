"""Blocking calls of Mooncake's client in threads."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lmcache_async.errors import TierClosedError
from lmcache_async.memory.threads import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """A thread pool for calls that read or write the arena's memory by address."""

    def __init__(self, num_threads: int) -> None:
        self._pool = WorkerPool(num_threads, thread_name_prefix="lmcache-mooncake")

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the call in a thread.

        If cancelled, a call that no thread has begun is withdrawn. A running call is awaited, because the
        memory that it uses must not be reused before.

        Raises:
            TierClosedError: The tier was closed.
        """
        try:
            future = self._pool.submit(call, *args, **kwargs)
        except RuntimeError as error:
            raise TierClosedError(f"the mooncake tier was closed: {error}") from error
        ended = _told(future)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            if not future.cancel():
                while not ended.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([ended])
            raise
        return future.result()

    def close(self) -> None:
        """Shut the threads down. No call may be running."""
        self._pool.shutdown(wait=True)


def _told(future: Future[T]) -> asyncio.Future[None]:
    """Return a future of the loop that is done when the call has ended."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell_loop(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)

    future.add_done_callback(tell_loop)
    return ended
