"""The border around a tier: every call ends within the deadline, and fails as TierError alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from lmcache_async.errors import BudgetExceededError, LMCacheAsyncError, TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.layers.base import TierLayer
from lmcache_async.types import ChunkKey

T = TypeVar("T")


class GuardLayer(TierLayer):
    """Deadline and error border of one tier.

    A call that is late, or whose caller was cancelled, is cancelled and left to end by itself: its
    caller goes on at once, while the buffers that it reads stay leased, and those that it still
    returns are given back, until it has *really* ended. `statistics` of the layer counts such calls.

    Args:
        inner: The tier.
        name: What messages call it.
        timeout_s: Seconds that a call may take.
        close_timeout_s: Seconds that closing waits for calls given up; None is `timeout_s`.
        logger: Where unexpected errors of the tier go, once per cause.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        name: str,
        timeout_s: float,
        logger: LimitedLogger,
        close_timeout_s: float | None = None,
    ) -> None:
        super().__init__(inner)
        self._close_timeout_s = timeout_s if close_timeout_s is None else min(timeout_s, close_timeout_s)
        self._name = name
        self._timeout_s = timeout_s
        self._logger = logger
        self._late: set[asyncio.Task[Any]] = set()

    @property
    def late_calls(self) -> int:
        """Calls given up by their callers that have not ended yet."""
        return len(self._late)

    async def drain(self, *, timeout_s: float) -> bool:
        """Wait until the calls given up so far have really ended; False when the deadline came first."""
        if not self._late:
            return True
        _, running = await asyncio.wait(set(self._late), timeout=timeout_s)
        return not running

    async def contains(self, key: ChunkKey) -> bool:
        return await self._call("contains", self.inner.contains(key))

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self._call("count_prefix", self.inner.count_prefix(keys))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        there = await self._call("contains_many", self.inner.contains_many(keys))
        self._check_count("contains_many", len(there), len(keys))
        return there

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return await self._call("get", self.inner.get(key, allocate), lambda buffer: _release([buffer]))

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        results = await self._call("get_many", self.inner.get_many(keys, allocate), _release)
        try:
            self._check_count("get_many", len(results), len(keys))
        except TierError:
            _release(results)
            raise
        return results

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        kept = buffer.retain()
        await self._call("put", self.inner.put(key, kept), finally_=kept.release)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        kept = [(key, buffer.retain()) for key, buffer in items]
        return await self._call(
            "put_many", self.inner.put_many(kept), finally_=lambda: _release([b for _, b in kept])
        )

    async def remove(self, key: ChunkKey) -> bool:
        return await self._call("remove", self.inner.remove(key))

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self._call("reject", self.inner.reject(key, cause))

    async def clear(self) -> int:
        return await self._call("clear", self.inner.clear())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._late:
                await asyncio.wait(self._late, timeout=self._close_timeout_s)
        finally:
            await self.inner.__aexit__(kind, error, trace)

    async def _call(
        self,
        verb: str,
        coroutine: Coroutine[Any, Any, T],
        discard: Callable[[T], None] | None = None,
        finally_: Callable[[], None] | None = None,
    ) -> T:
        """Await a call of the tier; `discard` takes a result nobody waits for any more."""
        task = asyncio.ensure_future(coroutine)
        if finally_ is not None:
            task.add_done_callback(lambda _: finally_())
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._leave(task, discard)
            raise
        if not done:
            self._leave(task, discard)
            raise TierUnavailableError(f"tier {self._name!r}: {verb} gave no answer in {self._timeout_s} s")
        try:
            return task.result()
        except (TierError, BudgetExceededError):
            raise
        except LMCacheAsyncError as error:
            raise TierError(f"tier {self._name!r}: {verb} failed: {error}") from error
        except Exception as error:
            # The border: whatever a third-party tier raises becomes a miss or a drop, and is told once.
            self._logger.report(
                f"{self._name}.{verb}.{type(error).__name__}",
                "tier %r: %s raised %s: %s",
                self._name,
                verb,
                type(error).__name__,
                error,
            )
            raise TierError(f"tier {self._name!r}: {verb} raised {type(error).__name__}: {error}") from error

    def _check_count(self, verb: str, answers: int, asked: int) -> None:
        if answers != asked:
            raise TierError(f"tier {self._name!r}: {verb} gave {answers} answers for {asked} chunks")

    def _leave(self, task: asyncio.Task[T], discard: Callable[[T], None] | None) -> None:
        def ended(task: asyncio.Task[T]) -> None:
            self._late.discard(task)
            if task.cancelled() or task.exception() is not None:
                return
            if discard is not None:
                discard(task.result())

        self._late.add(task)
        task.add_done_callback(ended)
        task.cancel()


def _release(buffers: Sequence[Buffer | TierError | None]) -> None:
    for buffer in buffers:
        if isinstance(buffer, Buffer):
            buffer.release()
