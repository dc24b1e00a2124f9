"""Thread pool that drops references to arguments before the future resolves, and uncancellable waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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

    If the call is cancelled, it waits until the function has ended, then raises CancelledError. The buffers
    of the function are in use until then.
    """
    return await see_through(asyncio.get_running_loop().run_in_executor(executor, function))


async def see_through(work: Awaitable[T]) -> T:
    """Return the result of `work`. If cancelled, wait until `work` has ended, then raise CancelledError."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await really_ended(future)
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it
        raise


async def really_ended(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended and suppress cancellation.

    For a caller that was already cancelled and raises CancelledError afterwards.
    """
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
