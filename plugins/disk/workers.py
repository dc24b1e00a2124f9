"""Blocking calls in named threads, never abandoned half way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import aiofiles.os

from lmcache_async.errors import TierClosedError
from lmcache_async.memory.threads import WorkerPool, really_ended, see_through

T = TypeVar("T")


class Workers:
    """A few threads for blocking calls."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.executor = WorkerPool(num_threads, thread_name_prefix=name)
        self._beside = WorkerPool(1, thread_name_prefix=f"{name}-beside")
        self._helpers = WorkerPool(num_threads, thread_name_prefix=f"{name}-help")

    def start(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Have a thread make the call.

        Raises:
            TierClosedError: The tier was closed while its calls were under way.
        """
        return self._submit(self.executor, call, *args)

    def start_beside(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """The same on a thread of its own, one call after the other, that takes no turn of the others'."""
        return self._submit(self._beside, call, *args)

    def ask(self, call: Callable[[], None]) -> None:
        """Have a further thread make the call, which somebody else makes if this one does not.

        Raises:
            RuntimeError: The tier is closed.
        """
        self._helpers.submit(call)

    @staticmethod
    def _submit(pool: WorkerPool, call: Callable[..., T], *args: Any) -> Future[T]:
        try:
            return pool.submit(call, *args)
        except RuntimeError as error:
            raise TierClosedError(f"the disk tier was closed: {error}") from error

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """A short call without buffers; cancelled, it waits for its real end all the same."""
        return await see_through(aiofiles.os.wrap(call)(*args, executor=self.executor))

    @property
    def _pools(self) -> tuple[WorkerPool, ...]:
        return self._beside, self.executor, self._helpers

    def close(self) -> None:
        """Wait for calls that run; there are none when every `end` has ended."""
        for pool in self._pools:
            pool.shutdown(wait=True)

    def abandon(self, when_ended: Callable[[], None]) -> None:
        """Begin no further call; `when_ended` is called, in a thread, when those that run have ended."""

        def wait() -> None:
            for pool in self._pools:
                pool.shutdown(wait=True, cancel_futures=True)
            when_ended()

        # A daemon, as a file system that never answers would keep the interpreter from ending.
        threading.Thread(target=wait, name="lmcache-disk-close", daemon=True).start()


async def end(future: Future[Any], *, abandon: bool = False) -> None:
    """Wait until the call has ended; its outcome is in `future` and is not raised here.

    Cancelled, it takes the call back if no thread has begun it (`future.cancelled()`), or else waits
    for its real end: the memory that it works on is nobody else's before.

    Args:
        abandon: Cancelled, do not wait: the call works on no memory of anybody's.
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
        if not future.cancel() and not abandon:
            await really_ended(ended)
        raise
