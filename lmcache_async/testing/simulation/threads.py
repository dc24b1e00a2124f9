"""Thread pools without threads: what is submitted runs as steps of the simulated loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from lmcache_async.testing.simulation.loop import SimulatedLoop

DEFAULT_WORKERS = 4


@dataclass(slots=True, eq=False)
class _Call:
    future: Future[Any]
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    ran: bool = False
    error: BaseException | None = None
    result: Any = None

    def run(self) -> None:
        self.ran = True
        try:
            self.result = self.function(*self.args, **self.kwargs)
        except BaseException as error:  # noqa: BLE001 - as a pool does: it is the future's
            self.error = error
        self.function, self.args, self.kwargs = _nothing, (), {}

    def end(self) -> None:
        if not self.ran:
            self.run()
        result, error, self.result, self.error = self.result, self.error, None, None
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass(slots=True, eq=False)
class _Pool:
    workers: int
    queue: deque[_Call] = field(default_factory=deque)
    running: list[_Call] = field(default_factory=list)


class SimulatedThreads:
    """Every pool of one simulated process, each with as many workers as it asked for.

    A call starts some time after a worker is free for it; until then it can be withdrawn. It ends some
    time later. Its work is done in one piece, either as it starts or as it ends: that is drawn.
    """

    def __init__(self, loop: SimulatedLoop, rng: Random, delay: Callable[[], float]) -> None:
        self._loop = loop
        self._rng = rng
        self._delay = delay
        self._pools: dict[Executor | None, _Pool] = {}

    def submit(
        self,
        executor: Executor | None,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Future[Any]:
        pool = self._pools.get(executor)
        if pool is None:
            pool = _Pool(getattr(executor, "_max_workers", DEFAULT_WORKERS))
            self._pools[executor] = pool
        call = _Call(Future(), function, args, kwargs)
        pool.queue.append(call)
        self._start_one(pool)
        return call.future

    def finish(self, executor: Executor) -> None:
        """Run what is left of a pool to its end, as waiting for its shutdown does."""
        pool = self._pools.pop(executor, None)
        if pool is None:
            return
        for call in pool.running:
            call.end()
        pool.running.clear()
        while pool.queue:
            call = pool.queue.popleft()
            if call.future.set_running_or_notify_cancel():
                call.end()

    def drop(self) -> None:
        """Forget all that was submitted: the process is gone, and whoever asks for a result gets an error."""
        for pool in self._pools.values():
            for call in (*pool.running, *pool.queue):
                call.future._done_callbacks.clear()  # type: ignore[attr-defined]
                if not call.future.cancel():
                    call.future.set_exception(RuntimeError("the process is gone"))
        self._pools.clear()

    def _start_one(self, pool: _Pool) -> None:
        self._loop.call_later(self._delay(), self._begin, pool)

    def _begin(self, pool: _Pool) -> None:
        if len(pool.running) >= pool.workers:
            return  # whoever ends begins the next
        while pool.queue:
            call = pool.queue.popleft()
            if call.future.set_running_or_notify_cancel():
                pool.running.append(call)
                if self._rng.random() < 0.5:
                    call.run()
                self._loop.call_later(self._delay(), self._end, pool, call)
                return

    def _end(self, pool: _Pool, call: _Call) -> None:
        if call not in pool.running:  # `finish` came first
            return
        pool.running.remove(call)
        call.end()
        self._begin(pool)


@contextlib.contextmanager
def threads_as_steps() -> Iterator[None]:
    """Within the block every thread pool used on a `SimulatedLoop` belongs to that loop; others are as ever."""
    submit, shutdown = ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown

    def submit_(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        threads = _threads()
        if threads is None:
            return submit(self, fn, *args, **kwargs)
        return threads.submit(self, fn, args, kwargs)

    def shutdown_(self: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait and (threads := _threads()) is not None:
            threads.finish(self)
        shutdown(self, wait, cancel_futures=cancel_futures)

    with (
        patch.object(ThreadPoolExecutor, "submit", submit_),
        patch.object(ThreadPoolExecutor, "shutdown", shutdown_),
    ):
        yield


def _threads() -> SimulatedThreads | None:
    return getattr(asyncio._get_running_loop(), "threads", None)


def _nothing() -> None: ...
