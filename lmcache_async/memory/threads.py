"""Thread pool that drops references to arguments before a future resolves, and waiting for calls despite cancellation.

`reserve_descriptors` enlarges the table of file descriptors in advance.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, thread
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from lmcache_async.errors import LMCacheAsyncError

P = ParamSpec("P")
T = TypeVar("T")

Task: TypeAlias = "asyncio.Task[Any] | None"

_joined_at_exit: MutableMapping[Any, Any] = getattr(thread, "_threads_queues", {})
"""Threads of all pools, which `concurrent.futures` joins when the interpreter ends. It has no public name."""


DESCRIPTORS = 1024
"""File descriptors of a process for which there is room in advance."""


def reserve_descriptors() -> None:
    """Make room for `DESCRIPTORS` file descriptors in the kernel's table of this process, in a thread of its own.

    Linux enlarges the table in the call that opens a file. If the process has threads, this call waits for an RCU grace period:
    usually tens of milliseconds, but up to ten seconds were measured on two busy cores, in which a load or the event loop waited.
    """

    def reserve() -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError), Path(os.devnull).open("rb") as file:
            os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(DESCRIPTORS, limit) - 1))

    with contextlib.suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=reserve, name="lmcache-async-descriptors", daemon=True).start()


class ThreadStartError(LMCacheAsyncError, RuntimeError):
    """No thread can be started for a call."""


class WorkerPool(ThreadPoolExecutor):
    """Thread pool for calls that use buffers.

    A plain pool drops the function and the arguments of a call some time after its future is resolved. Views
    of a slab among them would keep the slab in use until the thread runs again, on a busy machine long after
    the last lease was released.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        call = _Call(fn, args, kwargs)
        future = super().submit(call)
        future.add_done_callback(call.forget)  # a cancelled call stays in the queue until a thread takes it
        return future

    def abandon(self) -> None:
        """Let the interpreter exit without waiting for running calls, if the threads of the pool are daemon threads."""
        for worker in self._threads:
            _joined_at_exit.pop(worker, None)

    def _adjust_thread_count(self) -> None:
        """Start a thread for a queued call. If none can be started, leave the call to the others.

        Raises:
            ThreadStartError: There are no others.
        """
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:  # "can't start new thread"
            if not self._threads:
                self._work_queue.get_nowait()  # otherwise a later thread would run the call, which no caller awaits
                raise ThreadStartError(str(error)) from error


class _Call(Generic[T]):
    """Runs a function at most once and drops the references to it and its arguments."""

    __slots__ = ("_what",)

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._what: list[tuple[Callable[..., T], tuple[Any, ...], dict[str, Any]]] = [
            (function, args, kwargs)
        ]

    def __call__(self) -> T:
        function, args, kwargs = self._what.pop()
        return function(*args, **kwargs)

    def forget(self, _: Future[T]) -> None:
        self._what.clear()


async def in_thread(executor: Executor, function: Callable[[], T]) -> T:
    """Run `function` on the executor and return its result.

    If the call is cancelled, a function that no thread has begun is withdrawn. A running function is awaited
    before CancelledError is raised, because it uses its buffers until then.
    """
    (result,) = await in_threads(executor, [function])
    return result


async def in_threads(executor: Executor, functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run the functions on the executor and return their results, or raise the first error. See `in_thread`."""
    calls: list[Future[T]] = []
    try:
        calls.extend(map(executor.submit, functions))
    finally:  # if a function cannot be submitted, those before it still use their buffers
        await wait_ended(*calls)
    try:
        return list(map(Future.result, calls))  # no frame refers to a single call
    finally:
        # Break the reference cycle of an error and this frame, which would keep the buffers in use.
        del calls, functions


def yield_gil() -> None:
    """Release the GIL. A waiting thread takes it at once only from a thread that sleeps."""
    time.sleep(1e-6)


async def run_shielded(work: Awaitable[T], *, on_cancel: Callable[[], object] | None = None) -> T:
    """Return the result of `work`. If cancelled, wait until `work` has ended, then raise CancelledError.

    `on_cancel` may withdraw work that has not begun.
    """
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await wait_done(future)
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it
        raise
    finally:
        # Break the reference cycle of an error and this frame, which would keep the buffers in use.
        del future, work


async def wait_done(*work: asyncio.Future[Any]) -> None:
    """Wait until all of `work` has ended and suppress cancellation.

    For a caller that was already cancelled and raises CancelledError afterwards.
    """
    while pending := [one for one in work if not one.done()]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(pending)


async def wait_ended(
    *calls: Future[Any], abandon: bool = False, on_cancel: Callable[[], object] | None = None
) -> None:
    """Wait until calls that were submitted to a pool have ended. Their outcomes are not raised.

    If cancelled, calls that no thread has begun are withdrawn (`Future.cancelled()`). Calls that have begun are
    awaited: their memory must not be reused before.

    Args:
        calls: The futures of the calls.
        abandon: If cancelled, do not wait for calls that have begun. They must not use memory of the caller.
        on_cancel: Called when cancelled, before the wait for calls that have begun. May shorten them.
    """
    if not calls:
        return
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    lock = threading.Lock()
    running = len(calls)

    def set_ended() -> None:
        if not ended.done():
            ended.set_result(None)

    def count_ended(_: Future[Any]) -> None:
        nonlocal running
        with lock:
            running -= 1
            if running:
                return  # the loop is woken once for all calls
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_ended)

    for call in calls:
        call.add_done_callback(count_ended)
    try:
        await asyncio.wait([ended])
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        withdrawn = [call.cancel() for call in calls]
        if not (abandon or all(withdrawn)):
            await wait_done(ended)
        raise


def running_task() -> Task:
    """Return the running task; None if there is none."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no running loop
        return None


def is_ending(error: BaseException, task: Task) -> bool:
    """Whether `error` ends the task of the caller, so that it must propagate.

    A CancelledError ends the task if its cancellation was requested; otherwise a plug-in raised it by itself. A
    GeneratorExit ends the task if the task is not running, because its coroutine is being closed.

    Args:
        error: Exception raised by the call.
        task: Task that made the call.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit) and (task is None or running_task() is not task)
