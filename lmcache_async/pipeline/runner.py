"""Runs a request through a chain: batches in flight bounded in bytes, results in order, nothing left behind."""

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
    """A chain ready to run.

    The stages that take whole requests run once; what the last of them gives is cut into batches, which
    run through the other stages concurrently. Stages marked `ordered` see the batches one after another.
    Every batch's leases are back, and no stage runs any more, when `run` ends, however it ends.

    Args:
        failed: Makes the result of a batch that a cache error, or the deadline, kept from its end.
        ends: Whether a result ends the run: batches after it are given up.
        admit: Awaited before each batch begins, with the chunks of the whole run and the seconds that are left.
            With a BudgetExceededError the rest of the run is given up.
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
        """The results of the request's batches, in prefix order; up to the one that ended the run.

        Args:
            timeout_s: After this the rest is given up: it becomes `failed(batch, "deadline")`. A batch
                that is being written to the device by then is waited for, and counts.
            on_copied: Called once, as soon as no batch will touch device memory any more.

        Raises:
            LMCacheAsyncError: A stage that takes the whole request failed.
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
                    # A callback and not a `finally`: a task cancelled before its first step runs no code.
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
                    run.scopes[index].append(value.scope)  # of a stage that did not pass on the batch's own
                if info.reads_device:
                    gate.pass_one(index)
            run.results[index] = value
        except LMCacheAsyncError as error:
            run.results[index] = self._failed(batch, error_cause(error))
        except BaseException as error:
            # Frames that know the error, known by its traceback, would keep views of the batch's buffers,
            # and so the slabs, until a garbage collection.
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
    """What a stage makes of a value. Stages are plug-ins: what one raises ends no event loop.

    Raises:
        RuntimeError: It raised an exception that is no Exception, such as SystemExit, or a CancelledError
            where nobody had asked it to cancel.
        TypeError: It gave something else than it is annotated with.
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
    """One word for the counters."""
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
    """The state of one run: which batches have ended, and whether one of them ended the whole."""

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
        """Wait for the batch before; False when the run has ended before this batch."""
        await self.done[index - 1].wait()
        return index <= self._last

    def end_after(self, index: int) -> None:
        """Give up the batches after `index`; what they have under way is drained by their tasks."""
        self.ended = True
        self._last = min(self._last, index)
        for task in self.tasks[index + 1 :]:
            task.cancel()

    def give_up(self) -> None:
        """The deadline: end what has not come so far that rows of the device may be written already."""
        self.ended = True
        for index, task in enumerate(self.tasks):
            if index not in self.writing:
                task.cancel()


class _Gate:
    """Calls back once all batches have passed the stage that reads device memory, or have ended."""

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
