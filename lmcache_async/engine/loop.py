"""A uvloop event loop on a thread of its own, started and closed by its owner."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from lmcache_async.errors import EngineClosedError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. A daemon: it never keeps a process alive.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str = "lmcache-async-loop") -> None:
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        # Held to put anything on the loop: behind the closing it would never run.
        self._lock = threading.Lock()
        self._closed = False
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine on the loop. Cancelling the future cancels it.

        Raises:
            EngineClosedError: The loop was closed; the coroutine is closed too.
        """
        with self._lock:
            if not self._closed:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                return future
        coroutine.close()
        raise EngineClosedError("the event loop's thread was closed")

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call the function on the loop's thread.

        Raises:
            EngineClosedError: The loop was closed.
        """
        with self._lock:
            if self._closed:
                raise EngineClosedError("the event loop's thread was closed")
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self, timeout_s: float = 3.0) -> None:
        """Cancel what still runs, drain it within the deadline, stop the loop. May be called twice.

        Who waits for a coroutine that did not end in time gets CancelledError.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            drained = asyncio.run_coroutine_threadsafe(_cancel_others(timeout_s), self._loop)
        try:
            drained.result(timeout_s + 1.0)
        except (TimeoutError, concurrent.futures.CancelledError):
            drained.cancel()
        for future in list(self._futures):
            future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._started.set)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


async def _cancel_others(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    # Again and again: what is cancelled may start others while it cleans up.
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            return
