"""An event loop with virtual time, an order drawn from a seed and threads as steps; no I/O."""

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
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import xxhash


class Violation(AssertionError):
    """Something happened that must never happen; the message says what, and with which values."""


class Deadlock(Violation):
    """Nothing is ready, no timer runs, and tasks wait.

    Attributes:
        stacks: Each waiting task with the frames that it waits in.
    """

    def __init__(self, message: str, stacks: Sequence[str]) -> None:
        super().__init__("\n".join([message, *stacks]))
        self.stacks = tuple(stacks)


class ProcessCrashed(BaseException):
    """The simulated process ends here, between two steps of its loop. Not to be caught by what runs in it."""


class Hang(KeyboardInterrupt):
    """Real time passes and the simulation does not go on. A KeyboardInterrupt: no task and no border keeps it."""


_FLUSH = 4096


class Trace:
    """Takes in every scheduling decision of a simulation.

    Attributes:
        decisions: How many so far.
        recent: The last few, as (virtual seconds, what ran, out of how many that could have run).
    """

    def __init__(self, *, keep: int = 40) -> None:
        self.decisions = 0
        self.recent: deque[tuple[float, str, int]] = deque(maxlen=keep)
        self._digest = xxhash.xxh3_128()
        self._numbers = array("q")
        self._names: dict[str, int] = {}

    def decide(self, now: float, what: str, number: int, chosen: int, candidates: int) -> None:
        """One step: callback `what` (of task `number`, if it is one) ran as the `chosen` of `candidates`."""
        self.decisions += 1
        name = self._names.get(what)
        if name is None:
            name = self._name(what)
        self._numbers.extend((int(now * 1e9), name, number, chosen, candidates))
        self.recent.append((now, what, candidates))
        if len(self._numbers) >= _FLUSH:
            self._flush()

    def note(self, text: str) -> None:
        """Something else that belongs to the run: an operation that began, and how it ended."""
        self._flush()
        self._digest.update(text.encode())

    def digest(self) -> str:
        """32 hex digits over all of it."""
        self._flush()
        return self._digest.hexdigest()

    def _name(self, what: str) -> int:
        self.note(what)
        return self._names.setdefault(what, len(self._names))

    def _flush(self) -> None:
        self._digest.update(self._numbers)
        del self._numbers[:]


def stack_of(task: asyncio.Task[Any]) -> str:
    """The task's coroutines, outermost first, each with the line that it waits at."""
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


T = TypeVar("T")

STEP_SECONDS = 1e-6
"""What a step costs of virtual time, so that who waits for time by turning the loop gets there."""

MAX_CHOICE = 8
"""Tasks to choose from at most, from the front of the queue on: none starves."""


class SimulatedTask(asyncio.Task[T]):
    """Hashed by its number, so that sets of tasks are walked in the same order in every run."""

    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number

    __eq__ = object.__eq__


class SimulatedFuture(asyncio.Future[T]):
    """Hashed by its number, as tasks are."""

    def __init__(self, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(**options)

    def __hash__(self) -> int:
        return self.number

    __eq__ = object.__eq__


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs one simulated process to its end, its crash or a violation.

    What may be permuted, and what not: a callback that is no step of a task (a timer, a future's
    callback, a `call_soon`) keeps its place in the queue, before everything that was scheduled after
    it and behind everything that was scheduled before. Among steps of tasks with no such callback
    between them, which one runs is drawn from the seed. When nothing is ready, time jumps to the next
    timer; when there is none, that is a `Deadlock`. Calls to thread pools are steps too, see `threads`.

    Args:
        rng: Where every decision comes from.
        trace: Where every decision goes to.
        start: Virtual time to begin with, in seconds.
        thread_delay: Draws how long a thread takes to start a call, and again to end it.
        max_real_s: Real seconds after which a run that still turns counts as hanging.

    Attributes:
        crash_at: The decision before which the process crashes; None for no crash.
        deadline: Virtual time at which whatever runs should have ended long ago.
        unhandled: What was reported to the loop's exception handler.
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
        """Nothing to do: a generator left behind is closed when it is dropped."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there are no threads."""

    def live_tasks(self) -> list[SimulatedTask[Any]]:
        """The tasks that have not ended, in the order they were made."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimulatedTask)]
        return sorted(tasks, key=lambda task: task.number)

    # Running.

    def run_until_complete(self, future: Any) -> Any:
        """Run until `future` is done.

        Raises:
            Deadlock: It can never be.
            ProcessCrashed: `crash_at` came first. What is left is for `abandon`.
            Violation: The loop turned and turned.
        """
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
        if self._closed:  # of a process that is no more
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
        """Time to the next timer."""
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
    """A loop; what it does not have (sockets, signals, processes) raises NotImplementedError."""
    return SimulatedLoop(rng, trace, **options)  # type: ignore[abstract]  # by the stubs, not by Python


_MOST_AWAITS = 100  # in the `finally` blocks of one coroutine


def abandon(loop: SimulatedLoop) -> None:
    """Drop everything that still ran on the loop, whatever it waited for.

    A real process would just be gone. Here coroutines have to be closed, which runs their `finally`
    blocks: the loop is closed before, so that they reach nothing that outlives the process. What threads
    had still to do is not done; a thread begun in a `finally` block runs at once.
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
    for _ in range(_MOST_AWAITS):  # one that awaits in a `finally` is still there after the first
        with contextlib.suppress(BaseException):
            coroutine.close()
            return


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What the dying say: coroutines that were never awaited, or that await in a `finally`."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
