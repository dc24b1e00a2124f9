"""Runs a request through a chain, with a bound on the bytes in flight and results in prefix order."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NoReturn, TypeVar

from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    EngineClosedError,
    LMCacheAsyncError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.memory.threads import Task, is_ending
from lmcache_async.pipeline.batch import Batch, Request, Scope
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.stage import StageInfo

Out = TypeVar("Out")


@dataclass(kw_only=True, slots=True, eq=False)
class Runner(Generic[Out]):
    """Runs requests through a chain.

    Stages for whole requests run once. The result of the last of them is split into batches, which pass
    through the other stages concurrently. Stages marked `ordered` process the batches one after another. When
    `run` ends, for whatever reason, all leases of the batches are released and no stage is running.

    Attributes:
        chain: The chain.
        batch_chunks: Chunks of a batch.
        chunk_bytes: Bytes of one chunk, for the budget.
        budget: Bytes in flight, which may be shared with other runners.
        failed: Creates the result of a batch that failed with a cache error or missed the deadline.
        ends: Returns whether the result of a batch ends the run; later batches are abandoned.
        admit: Awaited before each batch starts, with the batch, the number of chunks of the whole run and the
            remaining seconds. If it raises BudgetExceededError, the rest of the run is abandoned.
        logger: Logs the reason if a stage fails.
    """

    chain: Chain[Any, Out]
    batch_chunks: int
    chunk_bytes: int
    budget: ByteBudget
    failed: Callable[[Batch, str], Out]
    ends: Callable[[Batch, Out], bool] = lambda *_: False
    admit: Callable[[Batch, int, float], Awaitable[None]] | None = None
    logger: LimitedLogger = field(default_factory=lambda: LimitedLogger(logging.getLogger(__name__)))

    async def run(
        self, request: Request, *, timeout_s: float, on_copied: Callable[[], None] | None = None
    ) -> list[Out]:
        """Return the results of the request's batches in prefix order, up to the one that ended the run.

        If the call is cancelled, the running batches are cancelled and their ends are awaited.

        Args:
            request: The request.
            timeout_s: Deadline in seconds. Batches not finished by then get the result `failed(batch,
                "deadline")`. A batch that is being written to the device is awaited, and its result counts.
            on_copied: Called once, when no batch accesses device memory any more.

        Raises:
            LMCacheAsyncError: A stage for whole requests failed, or did not end by the deadline.
        """
        copied = Once(on_copied)
        scopes: list[Scope] = []  # of batches that are split afterwards, or for which a later stage failed
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        limit = asyncio.timeout_at(deadline)
        try:
            head: Any = request
            async with limit:
                for info in self.chain.head:
                    try:
                        head = await info.stage(head)
                    except BaseException as error:
                        self._explain(info, error, asyncio.current_task())
                        raise
                    if not isinstance(head, info.result_type):
                        _refuse_result(info, head)
                    if isinstance(head, Batch):
                        head.scope.deadline = deadline
                        scopes.append(head.scope)
            run = _Run[Out](self._split(head), copied)
            timer = loop.call_at(deadline, run.end_at_deadline)
            try:
                async with asyncio.TaskGroup() as group:
                    for index, batch in enumerate(run.batches):
                        nbytes = batch.budget_bytes(self.chunk_bytes, self.budget.max_bytes)
                        try:
                            if nbytes or self.admit is not None:
                                await self._admit(run, batch, nbytes, deadline)
                        except BaseException as error:
                            batch.scope.close()
                            if isinstance(error, BudgetExceededError):
                                break
                            raise
                        if run.ended:
                            batch.scope.close()
                            self.budget.release(nbytes)
                            break
                        batch.scope.reserved_bytes = nbytes
                        batch.scope.deadline = deadline
                        task = group.create_task(self._run_batch(run, index))
                        run.tasks.append(task)
                        # Not in `finally`: a task that is cancelled before its first step runs no code.
                        task.add_done_callback(partial(self._finish, run, index, nbytes))
            finally:
                timer.cancel()
        except TimeoutError as error:
            if not limit.expired():
                raise  # of a stage or of what it calls
            raise BudgetExceededError(f"no answer from {self.chain!r} in {timeout_s} s") from error
        finally:
            for scope in scopes:
                scope.close()
            copied()
        return self._results(run)

    async def _admit(self, run: _Run[Out], batch: Batch, nbytes: int, deadline: float) -> None:
        """Wait until the batch may start, and reserve its bytes.

        Raises:
            BudgetExceededError: It may not start, or the run has ended meanwhile.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as run.admission:
                if self.admit is not None:
                    await self.admit(batch, run.num_chunks, deadline - loop.time())
                if nbytes:
                    await self.budget.reserve(nbytes, timeout_s=deadline - loop.time())
        except TimeoutError as error:
            if not (run.admission and run.admission.expired()):
                raise
            raise BudgetExceededError("the run has ended") from error
        finally:
            run.admission = None

    def _split(self, batch: Batch) -> list[Batch]:
        most = max(self.batch_chunks, self.budget.max_bytes // self.chunk_bytes)
        cuts = batch.cuts(self.batch_chunks, most)
        if len(cuts) == 1:
            return [batch]
        return [batch.part(start, stop) for start, stop in pairwise([0, *cuts])]

    async def _run_batch(self, run: _Run[Out], index: int) -> None:
        """Pass a batch through the stages of the tail."""
        batch = run.batches[index]
        task = asyncio.current_task()
        value: Any = batch
        try:
            for info in self.chain.tail:
                if info.ordered and index and not await run.wait_turn(index):
                    return
                if info.writes_device:
                    run.writing.add(index)
                try:
                    value = await info.stage(value)
                except BaseException as error:
                    self._explain(info, error, task)
                    raise
                if not isinstance(value, info.result_type):
                    _refuse_result(info, value)
                if isinstance(value, Batch) and value.scope is not batch.scope:
                    run.scopes[index].append(value.scope)  # the stage created a new scope
                if info.reads_device:
                    run.end_reading(index)
            run.results[index] = value
        except LMCacheAsyncError as error:
            run.results[index] = self.failed(batch, _CAUSES.get(type(error), "error"))
        except BaseException as error:
            _clear_frames(error)
            raise

    def _explain(self, info: StageInfo, error: BaseException, task: Task) -> None:
        """Log the reason of a failure that is only counted, and replace an exception that must not end the event loop.

        Raises:
            RuntimeError: The stage, which may be a plug-in, raised an exception not derived from Exception, such as
                SystemExit, or a CancelledError although the cancellation of `task`, which ran it, was not requested.
        """
        text = f"stage {info.name!r} raised {type(error).__name__}: {describe(error)}"
        if isinstance(error, LMCacheAsyncError) and not isinstance(error, EngineClosedError):
            self.logger.report(
                f"{info.name}.{type(error).__name__}", "%s; its chunks are dropped or missed", text
            )
        elif not (isinstance(error, Exception) or is_ending(error, task)):
            raise RuntimeError(text) from error

    def _results(self, run: _Run[Out]) -> list[Out]:
        results: list[Out] = []
        for batch, result in zip(run.batches, run.results, strict=True):
            results.append(self.failed(batch, "deadline") if result is None else result)
            if self.ends(batch, results[-1]):
                break
        return results

    def _finish(self, run: _Run[Out], index: int, nbytes: int, _: asyncio.Task[None]) -> None:
        for scope in run.scopes[index]:
            scope.close()
        self.budget.release(nbytes)
        run.end_reading(index)
        result = run.results[index]
        if result is None or self.ends(run.batches[index], result):
            run.end_after(index)
        run.set_done(index)


def _refuse_result(info: StageInfo, result: object) -> NoReturn:
    raise TypeError(f"stage {info.name!r} returned {type(result).__name__}, not {info.result_type.__name__}")


def _clear_frames(error: BaseException) -> None:
    """Clear the frames in the traceback of a stage's error. Their views of buffers would keep slabs in use until a collection.

    The traceback of an error that was raised before also has the frames of callers that caught it, and `clear` would end the
    coroutine of a suspended one. Below the frame of the stage, coroutines are cleared only in modules where they end too.
    """
    for depth, (frame, _) in enumerate(traceback.walk_tb(error.__traceback__)):
        is_coroutine = frame.f_code.co_flags & _SUSPENDABLE
        if depth <= 1 or not is_coroutine or frame.f_globals.get("__name__", "").startswith(_ENDING):
            with contextlib.suppress(RuntimeError):  # the frame is executing
                frame.clear()


_SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ENDING = tuple(f"lmcache_async.{name}." for name in ("stages", "tiers", "device", "memory"))

_CAUSES: dict[type[LMCacheAsyncError], str] = {
    BudgetExceededError: "no_room",
    ChunkCorruptError: "corrupt",
    TierFullError: "tier_full",
    TierUnavailableError: "tier_unavailable",
    EngineClosedError: "closed",
}
"""Causes of failed batches, as counted; "error" for other classes."""


class _Run(Generic[Out]):
    """State of one run: batches that have ended, and whether one of them ended the run."""

    def __init__(self, batches: list[Batch], copied: Once) -> None:
        count = len(batches)
        self.batches = batches
        self.num_chunks = sum(len(batch.chunks) for batch in batches)
        self._copied = copied
        self._reading = set(range(count))
        self.scopes = [[batch.scope] for batch in batches]
        self.results: list[Out | None] = [None] * count
        self.tasks: list[asyncio.Task[None]] = []
        self.ended = False
        self.admission: asyncio.Timeout | None = None  # of the batch that waits for its start
        self.writing: set[int] = set()
        self._done = [asyncio.get_running_loop().create_future() for _ in batches]  # of each batch
        self._last = count

    async def wait_turn(self, index: int) -> bool:
        """Wait until the batch before `index` has ended. Return False if the run ended before batch `index`."""
        await self._done[index - 1]
        return index <= self._last

    def set_done(self, index: int) -> None:
        """Let the batch after `index` continue."""
        if not self._done[index].done():  # the batch that waited for it was cancelled
            self._done[index].set_result(None)

    def end_reading(self, index: int) -> None:
        """Record that a batch does not read device memory any more; call back after the last one."""
        self._reading.discard(index)
        if not self._reading:
            self._copied()

    def end_after(self, index: int) -> None:
        """Cancel the batches after `index`; their tasks release what they hold."""
        self._end_admission()
        self._last = min(self._last, index)
        for task in self.tasks[index + 1 :]:
            task.cancel()

    def end_at_deadline(self) -> None:
        """Cancel all batches at the deadline, except those that may have written device rows."""
        self._end_admission()
        for index, task in enumerate(self.tasks):
            if index not in self.writing:
                task.cancel()

    def _end_admission(self) -> None:
        """Start no further batch, also none that waits for its start."""
        if self.admission is not None and not self.ended:  # a timeout that has expired cannot be rescheduled
            self.admission.reschedule(0.0)
        self.ended = True


class Once:
    """Calls a function on the first call only, and records the time of `time.perf_counter`."""

    def __init__(self, function: Callable[[], None] | None) -> None:
        self._function = function
        self.time: float | None = None

    def __call__(self) -> None:
        if self.time is None:
            self.time = time.perf_counter()
            if self._function is not None:
                self._function()
