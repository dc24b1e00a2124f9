"""Worker threads that hold nothing of a call any more by the time its end is known, and waits that never abandon one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool(ThreadPoolExecutor):
    """A thread pool for calls that work on buffers.

    A plain pool drops a call's function and arguments some time after its future is done: views of a
    slab among them would keep the slab busy until the thread gets its turn, on a busy machine long
    after its last lease came back.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        call = _Call(fn, args, kwargs)
        future = super().submit(call)
        future.add_done_callback(call.forget)  # withdrawn, it stays in the queue until a thread comes to it
        return future


class _Call(Generic[T]):
    """Runs a function at most once and lets go of it and of its arguments."""

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
    """Run `function` on the executor.

    Cancelled, it first waits until the function has really ended, then raises CancelledError: the buffers
    that it touches are nobody else's before.
    """
    return await see_through(asyncio.get_running_loop().run_in_executor(executor, function))


async def see_through(work: Awaitable[T]) -> T:
    """What `work` comes to. Cancelled, it waits for its real end all the same, then raises CancelledError."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await really_ended(future)
        if not future.cancelled():
            future.exception()  # looked at, so that asyncio does not warn of it
        raise


async def really_ended(work: asyncio.Future[Any]) -> None:
    """Wait for the end of `work`, however often cancelled: for one who was cancelled already, and says so then."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):  # told already; the work still goes on
            await asyncio.wait([work])
