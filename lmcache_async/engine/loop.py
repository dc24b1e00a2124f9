"""A uvloop event loop on its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from lmcache_async.errors import EngineClosedError
from lmcache_async.logging import LimitedLogger, describe

T = TypeVar("T")

LAST_S = 1.0
"""Seconds for tasks to clean up when the thread ends without `close`."""


class LoopThread:
    """Run coroutines for other threads. The thread is a daemon: it does not keep the process alive.

    After a SystemExit, a KeyboardInterrupt or a `loop.stop()` in a task or callback the loop continues. If the
    thread ends for another reason, waiting and later calls raise EngineClosedError at once.
    """

    def __init__(self, name: str = "lmcache-async-loop") -> None:
        self._process = os.getpid()
        self._logger = LimitedLogger(logging.getLogger(__name__))
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        # Held while work is submitted: work submitted after closing would never run.
        self._lock = threading.Lock()
        self.closed = ""  # while the loop accepts calls, else the reason why nothing runs any more
        self._stopping = False
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # an interrupt; the thread may run already
            self.closed = "the start of the event loop's thread failed"
            self._loop.call_soon_threadsafe(self._stop)
            raise

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that runs the thread. Forks do not copy threads."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse a call in a forked child, where the thread does not exist.

        Takes no lock, because a thread of the parent may have held it at the fork.

        Raises:
            EngineClosedError: The process was forked.
        """
        if self.inherited:
            raise EngineClosedError(
                f"the cache engine was opened in process {self._process}, from which this process {os.getpid()} was"
                f" forked; an engine cannot be used after a fork: open one in this process"
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine on the loop. Cancelling the future cancels the coroutine.

        Raises:
            EngineClosedError: The loop was closed or has ended, or the process was forked. The coroutine is closed.
        """
        if self.inherited:
            coroutine.close()
        self.check_process()
        with self._lock:
            if not self.closed:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                return future
        coroutine.close()
        raise EngineClosedError(self.closed)

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call the function on the loop's thread.

        Raises:
            EngineClosedError: The loop was closed or has ended, or the process was forked.
        """
        self.check_process()
        with self._lock:
            if self.closed:
                raise EngineClosedError(self.closed)
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self, timeout_s: float = 3.0) -> None:
        """Cancel all tasks, wait for them within the deadline and stop the loop. May be called twice.

        Futures of coroutines that did not end in time are cancelled. An interrupted call stops the loop at once.

        Raises:
            EngineClosedError: The process was forked. The loop of the parent is not affected.
        """
        self.check_process()
        with self._lock:
            has_ended = bool(self.closed)
            self.closed = self.closed or "the event loop's thread was closed"
            if not has_ended:
                drained = asyncio.run_coroutine_threadsafe(_cancel_others(timeout_s), self._loop)
        if has_ended:
            self._thread.join(timeout_s)
            return
        try:
            drained.result(timeout_s + 1.0)
        except (TimeoutError, concurrent.futures.CancelledError):
            drained.cancel()
        finally:
            for future in list(self._futures):
                future.cancel()
            with contextlib.suppress(RuntimeError):  # the thread has ended meanwhile
                self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        cause = "it ended"
        try:
            while not self._stopping:
                self._run_once()
        except BaseException as error:  # noqa: BLE001  # no caller above would report it
            cause = f"{type(error).__name__}: {describe(error)}"
        finally:
            self._end(cause)

    def _run_once(self) -> None:
        """Run until the loop is stopped. An exception of a task or callback ends only that task or callback."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            kind = type(error).__name__
            self._logger.report(
                kind, "a task or callback raised %s: %s; the event loop continues", kind, describe(error)
            )
        else:
            if not self._stopping:
                self._logger.report("stop", "a task or callback called loop.stop(); the event loop continues")

    def _stop(self) -> None:
        self._stopping = True
        self._loop.stop()

    def _end(self, cause: str) -> None:
        with self._lock:
            has_failed = not self.closed
            if has_failed:
                self.closed = f"the event loop's thread has ended: {cause}"
            lost = list(self._futures) if has_failed else []
        if has_failed:
            self._logger.log(logging.ERROR, "ended", "%s; every call fails from now on", self.closed)
            self._finish(_cancel_others(LAST_S))
            for future in lost:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has ended
                    future.set_exception(EngineClosedError(self.closed))
        self._finish(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine and ignore its failure."""
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(work)
        work.close()


async def _cancel_others(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    # Repeated, because a cancelled task may start others during its cleanup.
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            return
