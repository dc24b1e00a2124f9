"""Runs a request through a chain, with a bound on the bytes in flight and results in prefix order."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any, Generic, TypeVar

from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    EngineClosedError,
    LMCacheAsyncError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.observability.logging import describe
from lmcache_async.pipeline.batch import Batch, Request
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.stage import StageInfo

Out = TypeVar("Out")


class Runner(Generic[Out]):
    """Runs requests through a chain.

    Stages for whole requests run once. The result of the last of them is split into batches, which pass
    through the other stages concurrently. Stages marked `ordered` process the batches one after another. When
    `run` ends, for whatever reason, all leases of the batches are released and no stage is running.

    Args:
        chain: The chain.
        batch_chunks: Chunks of a batch.
        chunk_bytes: Bytes of one chunk, for the budget.
        budget: Bytes in flight, which may be shared with other runners.
        failed: Creates the result of a batch that failed with a cache error or missed the deadline.
        ends: Returns whether a result ends the run; later batches are abandoned.
        admit: Awaited before each batch starts, with the batch, the number of chunks of the whole run and the
            remaining seconds. If it raises BudgetExceededError, the rest of the run is abandoned.
    """

    def __init__(
        self,
        chain: Chain[Any, Out],
        *,
        batch_chunks: int,
        chunk_bytes: int,
        budget: ByteBudget,
        failed: Callable[[Batch, str], Out],
        ends: Callable[[Out], bool] = lambda _: False,
        admit: Callable[[Batch, int, float], Awaitable[None]] | None = None,
    ) -> None:
        self.chain = chain
        self._batch_chunks = batch_chunks
        self._chunk_bytes = chunk_bytes
        self._budget = budget
        self._failed = failed
        self._ends = ends
        self._admit = admit

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
        gate = _Gate(on_copied)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                head: Any = request
                for info in self.chain.head:
                    head = await pass_through(info, head)
            batches = self._split(head)
            gate.expect(len(batches))
            return await self._run_batches(batches, deadline, gate)
        except TimeoutError as error:
            raise BudgetExceededError(f"no answer from {self.chain!r} in {timeout_s} s") from error
        finally:
            gate.open()

    def _split(self, batch: Batch) -> list[Batch]:
        most = max(self._batch_chunks, self._budget.max_bytes // self._chunk_bytes)
        cuts = batch.cuts(self._batch_chunks, most)
        if len(cuts) == 1:
            return [batch]
        return [batch.part(start, stop) for start, stop in pairwise([0, *cuts])]

    async def _run_batches(self, batches: list[Batch], deadline: float, gate: _Gate) -> list[Out]:
        run = _Run[Out](batches)
        num_chunks = sum(len(batch.chunks) for batch in batches)
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline, run.give_up)
        try:
            async with asyncio.TaskGroup() as group:
                for index, batch in enumerate(batches):
                    nbytes = min(batch.budget_chunks * self._chunk_bytes, self._budget.max_bytes)
                    try:
                        if self._admit is not None:
                            await self._admit(batch, num_chunks, deadline - loop.time())
                        if nbytes:
                            await self._budget.reserve(nbytes, timeout_s=deadline - loop.time())
                    except BudgetExceededError:
                        batch.scope.close()
                        break
                    except BaseException:
                        batch.scope.close()
                        raise
                    if run.ended:
                        batch.scope.close()
                        self._budget.release(nbytes)
                        break
                    task = group.create_task(self._run_one(run, index, gate))
                    run.tasks.append(task)
                    # A callback instead of `finally`: a task that is cancelled before its first step runs no code.
                    task.add_done_callback(lambda _, i=index, n=nbytes: self._finish(run, i, n, gate))  # type: ignore[misc]
        finally:
            timer.cancel()
        results: list[Out] = []
        for batch, result in zip(batches, run.results, strict=True):
            results.append(self._failed(batch, "deadline") if result is None else result)
            if self._ends(results[-1]):
                break
        return results

    async def _run_one(self, run: _Run[Out], index: int, gate: _Gate) -> None:
        batch = run.batches[index]
        try:
            value: Any = batch
            for info in self.chain.tail:
                if info.ordered and index and not await run.turn(index):
                    return
                if info.writes_device:
                    run.writing.add(index)
                value = await pass_through(info, value)
                if isinstance(value, Batch) and value.scope is not batch.scope:
                    run.scopes[index].append(value.scope)  # the stage created a new scope
                if info.reads_device:
                    gate.pass_one(index)
            run.results[index] = value
        except LMCacheAsyncError as error:
            run.results[index] = self._failed(batch, error_cause(error))
        except BaseException as error:
            # The traceback references frames that hold views of the buffers. They would keep the slabs in use
            # until a garbage collection.
            traceback.clear_frames(error.__traceback__)
            raise

    def _finish(self, run: _Run[Out], index: int, nbytes: int, gate: _Gate) -> None:
        for scope in run.scopes[index]:
            scope.close()
        self._budget.release(nbytes)
        gate.pass_one(index)
        result = run.results[index]
        if result is None or self._ends(result):
            run.end_after(index)
        run.done[index].set()


async def pass_through(info: StageInfo, value: Any) -> Any:
    """Run a stage and check the type of its result.

    Stages are plug-ins: their exceptions must not end the event loop.

    Args:
        info: The stage.
        value: Request or batch for the stage.

    Raises:
        RuntimeError: The stage raised an exception not derived from Exception, such as SystemExit, or a
            CancelledError without a request to cancel.
        TypeError: The result is not of the annotated type.
    """
    task = running_task()
    try:
        result = await info.stage(value)
    except Exception:
        raise
    except BaseException as error:
        if is_ending(error, task):
            raise
        text = f"stage {info.name!r} raised {type(error).__name__}: {describe(error)}"
        raise RuntimeError(text) from error
    if isinstance(info.gives, type) and not isinstance(result, info.gives):
        raise TypeError(f"stage {info.name!r} gave {type(result).__name__}, not {info.gives.__name__}")
    return result


def error_cause(error: LMCacheAsyncError) -> str:
    """Return the cause of an error as one word, for the counters."""
    if isinstance(error, ChunkCorruptError):
        return "corrupt"
    return _CAUSES.get(type(error), "error")


_CAUSES: dict[type[LMCacheAsyncError], str] = {
    BudgetExceededError: "no_room",
    TierFullError: "tier_full",
    TierUnavailableError: "tier_unavailable",
    EngineClosedError: "closed",
}


class _Run(Generic[Out]):
    """State of one run: batches that have ended, and whether one of them ended the run."""

    def __init__(self, batches: list[Batch]) -> None:
        count = len(batches)
        self.batches = batches
        self.scopes = [[batch.scope] for batch in batches]
        self.results: list[Out | None] = [None] * count
        self.done = [asyncio.Event() for _ in range(count)]
        self.tasks: list[asyncio.Task[None]] = []
        self.ended = False
        self.writing: set[int] = set()
        self._last = count

    async def turn(self, index: int) -> bool:
        """Wait for the batch before. Return False if the run ended before this batch."""
        await self.done[index - 1].wait()
        return index <= self._last

    def end_after(self, index: int) -> None:
        """Cancel the batches after `index`; their tasks release what they hold."""
        self.ended = True
        self._last = min(self._last, index)
        for task in self.tasks[index + 1 :]:
            task.cancel()

    def give_up(self) -> None:
        """Cancel all batches at the deadline, except those that may have written device rows."""
        self.ended = True
        for index, task in enumerate(self.tasks):
            if index not in self.writing:
                task.cancel()


class _Gate:
    """Calls back when every batch has passed the stage that reads device memory, or has ended."""

    def __init__(self, on_copied: Callable[[], None] | None) -> None:
        self._on_copied = on_copied
        self._waiting: set[int] = set()

    def expect(self, count: int) -> None:
        self._waiting = set(range(count))

    def pass_one(self, index: int) -> None:
        self._waiting.discard(index)
        if not self._waiting:
            self.open()

    def open(self) -> None:
        callback, self._on_copied = self._on_copied, None
        if callback is not None:
            callback()
