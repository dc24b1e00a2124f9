"""Worker threads that hold nothing of a call any more by the time its end is known."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
