"""An event loop with virtual time, a seeded random order, and threads simulated as steps. It does no I/O."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import math
import sys
import threading
import time
import warnings
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import xxhash


class Violation(AssertionError):
    """An invariant is violated. The message names it and the values."""


class Deadlock(Violation):
    """Nothing is ready, no timer runs, and tasks wait.

    Attributes:
        stacks: Frames of each waiting task.
    """

    def __init__(self, message: str, stacks: Sequence[str]) -> None:
        super().__init__("\n".join([message, *stacks]))
        self.stacks = tuple(stacks)


class ProcessCrashed(BaseException):
    """The simulated process ends here, between two steps of its loop. Simulated code must not catch it."""


class Hang(KeyboardInterrupt):
    """No progress in real time. A KeyboardInterrupt, because neither tasks nor tier layers catch it."""


_FLUSH = 4096


class Trace:
    """Records every scheduling decision of a simulation.

    Attributes:
        decisions: Number of decisions so far.
        recent: The last decisions, as (virtual seconds, callback, number of candidates).
    """

    def __init__(self, *, keep: int = 40) -> None:
        self.decisions = 0
        self.recent: deque[tuple[float, str, int]] = deque(maxlen=keep)
        self._digest = xxhash.xxh3_128()
        self._numbers = array("q")
        self._names: dict[str, int] = {}

    def decide(self, now: float, what: str, number: int, chosen: int, candidates: int) -> None:
        """Record a step: callback `what` (of task `number`, or 0) ran as `chosen` of `candidates`."""
        self.decisions += 1
        name = self._names.get(what)
        if name is None:
            name = self._name(what)
        self._numbers.extend((int(now * 1e9), name, number, chosen, candidates))
        self.recent.append((now, what, candidates))
        if len(self._numbers) >= _FLUSH:
            self._flush()

    def note(self, text: str) -> None:
        """Record another event of the run, such as the start and result of an operation."""
        self._flush()
        self._digest.update(text.encode())

    def digest(self) -> str:
        """Return 32 hex digits over all records."""
        self._flush()
        return self._digest.hexdigest()

    def _name(self, what: str) -> int:
        self.note(what)
        return self._names.setdefault(what, len(self._names))

    def _flush(self) -> None:
        self._digest.update(self._numbers)
        del self._numbers[:]


def stack_of(task: asyncio.Task[Any]) -> str:
    """Return the task's coroutines, outermost first, each with the line at which it is suspended."""
    lines = [f"{task.get_name()}:"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f"  {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}")
        following = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
        if following is None and frame is None:
            lines.append(f"  {awaited!r}"[:200])
        awaited = following
    return "\n".join(lines)


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
    """All thread pools of one simulated process, each with its own number of workers.

    A call starts some time after a worker is free. Until then it can be cancelled. It ends some time later.
    Its function runs in one piece, at the start or at the end, which is drawn.
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
        """Run the remaining calls of a pool, as waiting for its shutdown does."""
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
        """Drop all submitted calls when the process ends. Their futures fail."""
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
            return  # a call that ends starts the next one
        while pool.queue:
            call = pool.queue.popleft()
            if call.future.set_running_or_notify_cancel():
                pool.running.append(call)
                if self._rng.random() < 0.5:
                    call.run()
                self._loop.call_later(self._delay(), self._end, pool, call)
                return

    def _end(self, pool: _Pool, call: _Call) -> None:
        if call not in pool.running:  # `finish` has ended it already
            return
        pool.running.remove(call)
        call.end()
        self._begin(pool)


@contextlib.contextmanager
def threads_as_steps() -> Iterator[None]:
    """Run the calls of all thread pools that are used on a `SimulatedLoop` as steps of that loop.

    Other loops are not affected.
    """
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
        patch.object(cpu, "compiled", None),  # its threads are not simulated
        patch.object(ThreadPoolExecutor, "submit", submit_),
        patch.object(ThreadPoolExecutor, "shutdown", shutdown_),
    ):
        yield


def _threads() -> SimulatedThreads | None:
    return getattr(asyncio._get_running_loop(), "threads", None)


def _nothing() -> None: ...


from lmcache_async.device import cpu

T = TypeVar("T")

STEP_SECONDS = 1e-6
"""Virtual seconds of a step, so that code that polls the clock in a loop makes progress."""

MAX_CHOICE = 8
"""Maximum number of tasks to choose from, from the front of the queue, so that none starves."""


class _Numbered:
    """Hashed by its number, so that sets have the same order in every run."""

    def __init__(self, number: int, *args: Any, **options: Any) -> None:
        self.number = number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self.number

    __eq__ = object.__eq__


class SimulatedTask(_Numbered, asyncio.Task[T]):
    """A task with a number."""


class SimulatedFuture(_Numbered, asyncio.Future[T]):
    """A future with a number."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs one simulated process until its end, a crash or a violation.

    Order of callbacks: a callback that is no step of a task (a timer, a future's callback, a `call_soon`)
    keeps its place in the queue. Among consecutive steps of tasks, the next one is drawn from the seed. If
    nothing is ready, time advances to the next timer; without a timer it is a `Deadlock`. Calls of thread
    pools are steps too, see `threads`.

    Args:
        rng: Random number generator of all decisions.
        trace: Record of all decisions.
        start: Initial virtual time, in seconds.
        thread_delay: Draws the delay of the start, and of the end, of a thread's call, in seconds.
        max_real_s: Real seconds after which a run counts as hanging.

    Attributes:
        crash_at: Number of the decision before which the process crashes; None for no crash.
        deadline: Virtual time, in seconds, at which the run fails.
        unhandled: Reports to the loop's exception handler.
    """

    def __init__(
        self,
        rng: Random,
        trace: Trace,
        *,
        start: float = 0.0,
        thread_delay: Callable[[], float] = lambda: 0.0,
        max_real_s: float = 300.0,
    ) -> None:
        self.trace = trace
        self.crash_at: int | None = None
        self.deadline = math.inf
        self.unhandled: list[str] = []
        self.threads = SimulatedThreads(self, rng, thread_delay)
        self._random = rng.random
        self._now = start
        self._ready: deque[tuple[asyncio.Handle, SimulatedTask[Any] | None]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._count = 0
        self._running = self._stopping = self._closed = False
        self._max_real_s = max_real_s

    # Time and callbacks.

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        owner = getattr(callback, "__self__", None)
        self._ready.append((handle, owner if type(owner) is SimulatedTask else None))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._next_number(), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:  # called by the handle
        del handle
        self._cancelled_timers += 1
        if self._cancelled_timers > 100 and 2 * self._cancelled_timers > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    # Futures, tasks, threads.

    def create_future(self) -> SimulatedFuture[Any]:
        return SimulatedFuture(self._next_number(), loop=self)

    def create_task(self, coro: Any, **options: Any) -> SimulatedTask[Any]:
        self._check_open()
        return SimulatedTask(self._next_number(), coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        return asyncio.wrap_future(self.threads.submit(executor, func, args, {}), loop=self)

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: abandoned generators are closed when they are deleted."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there are no threads."""

    def live_tasks(self) -> list[SimulatedTask[Any]]:
        """Return the tasks that have not ended, in order of creation."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimulatedTask)]
        return sorted(tasks, key=lambda task: task.number)

    # Running.

    def run_until_complete(self, future: Any) -> Any:
        """Run until `future` is done."""
        main = asyncio.ensure_future(future, loop=self)
        main.add_done_callback(self._main_done)
        self.run_forever()
        return main.result()

    def run_forever(self) -> None:
        self._check_open()
        hooks = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finish_generator)
        self._running, self._stopping = True, False
        deadline = time.monotonic() + self._max_real_s
        try:
            while not self._stopping:
                self._step()
                if not self.trace.decisions & 1023 and time.monotonic() > deadline:
                    raise Violation(f"the loop still turned after {self._max_real_s} real seconds")
        finally:
            self._running = False
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._closed:  # the process has ended
            return
        error = context.get("exception")
        told = f": {type(error).__name__}: {error}" if error is not None else ""
        self.unhandled.append(
            f"{context.get('message')}{told} ({context.get('task') or context.get('future')})"
        )

    def _main_done(self, _: object) -> None:
        self._stopping = True

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    def _step(self) -> None:
        timers = self._timers
        if not self._ready:
            self._jump()
            timers = self._timers
        self._now += STEP_SECONDS
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                self._ready.append((timer, None))
            else:
                self._cancelled_timers -= 1
        if not self._ready:
            return
        if self.crash_at is not None and self.trace.decisions >= self.crash_at:
            raise ProcessCrashed
        handle, task, chosen, candidates = self._pick()
        if handle.cancelled():
            return
        if task is None:
            callback = handle._callback  # type: ignore[attr-defined]
            what = getattr(callback, "__qualname__", None) or type(callback).__name__
            self.trace.decide(self._now, what, 0, chosen, candidates)
        else:
            self.trace.decide(self._now, task.get_coro().__qualname__, task.number, chosen, candidates)  # type: ignore[union-attr]
        handle._run()

    def _pick(self) -> tuple[asyncio.Handle, SimulatedTask[Any] | None, int, int]:
        ready = self._ready
        candidates = 0
        for _, task in ready:
            if task is None or candidates == MAX_CHOICE:
                break
            candidates += 1
        if candidates < 2:
            return *ready.popleft(), 0, 1
        chosen = int(self._random() * candidates)
        entry = ready[chosen]
        del ready[chosen]
        return *entry, chosen, candidates

    def _jump(self) -> None:
        """Advance time to the next timer."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not timers:
            tasks = self.live_tasks()
            raise Deadlock(
                f"deadlock: nothing is ready, no timer runs, {len(tasks)} tasks wait",
                [stack_of(task) for task in tasks],
            )
        self._now = max(self._now, timers[0][0])
        if self._now > self.deadline:
            stacks = "\n".join(stack_of(task) for task in self.live_tasks())
            raise Violation(
                f"still running at {self._now:.3f} s, after the deadline of virtual time:\n{stacks}"
            )


def new_loop(rng: Random, trace: Trace, **options: Any) -> SimulatedLoop:
    """Return a loop. Its methods for sockets, signals and processes raise NotImplementedError."""
    return SimulatedLoop(rng, trace, **options)  # type: ignore[abstract]  # by the stubs, not by Python


def run(coroutine_function: Callable[[], Coroutine[Any, Any, T]], *, thread_s: float = 0.0) -> T:
    """Run the function on a loop with virtual time, and return its result."""
    loop = new_loop(Random(1), Trace(), thread_delay=lambda: thread_s)
    with threads_as_steps():
        try:
            result: T = loop.run_until_complete(coroutine_function())
            return result
        finally:
            loop.close()


_MOST_AWAITS = 100  # in `finally` blocks of one coroutine


def abandon(loop: SimulatedLoop) -> None:
    """Drop everything that still runs on the loop.

    A real process would end without cleanup. Here coroutines have to be closed, which runs their `finally`
    blocks. The loop is closed before, so that they cannot change anything that outlives the process.
    Remaining calls of threads do not run; a thread that a `finally` block starts runs at once.
    """
    tasks = loop.live_tasks()
    loop.close()
    loop.threads.drop()
    asyncio._set_running_loop(loop)
    with _unheard(), patch.object(threading.Thread, "start", threading.Thread.run):
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
        tasks.clear()
        gc.collect()
    asyncio._set_running_loop(None)


def _close(coroutine: Any) -> None:
    for _ in range(_MOST_AWAITS):  # a coroutine that awaits in `finally` is not closed by one call
        with contextlib.suppress(BaseException):
            coroutine.close()
            return


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Suppress warnings about coroutines that were never awaited or that await in `finally`."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
