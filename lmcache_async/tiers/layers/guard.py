"""The border around a tier: every call ends within the deadline, and fails as TierError alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

from lmcache_async.errors import BudgetExceededError, LMCacheAsyncError, TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.layers.answers import check_answers
from lmcache_async.tiers.layers.deadline import BoundedLayer
from lmcache_async.types import ChunkKey

T = TypeVar("T")


class GuardLayer(BoundedLayer):
    """Deadline and error border of one tier; outside of all its other layers, and not to be configured away.

    Args:
        inner: The tier.
        name: What messages call it.
        timeout_s: Seconds that a call may take.
        close_timeout_s: Seconds that closing waits for calls given up, and then for the tier; None is `timeout_s`.
        open_timeout_s: Seconds that opening may take.
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
        open_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            inner,
            name=name,
            lookup_s=timeout_s,
            read_s=timeout_s,
            write_s=timeout_s,
        )
        self._close_timeout_s = timeout_s if close_timeout_s is None else min(timeout_s, close_timeout_s)
        self._logger = logger
        self._open_timeout_s = open_timeout_s

    async def __aenter__(self) -> Self:
        """Open the tier.

        Raises:
            TierUnavailableError: It was not open in time.
        """
        try:
            async with asyncio.timeout(self._open_timeout_s):
                return await super().__aenter__()
        except TimeoutError as error:
            raise TierUnavailableError(
                f"tier {self._name!r}: was not open after {self._open_timeout_s} s;"
                " see whether its backend answers, or give the tier a larger open_timeout_s"
            ) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the tier; one that does not end in time is left as it is, and said to be."""
        try:
            async with asyncio.timeout(2 * self._close_timeout_s):
                try:
                    await self.drain(timeout_s=self._close_timeout_s)
                finally:
                    await super().__aexit__(kind, error, trace)
        except TimeoutError:
            self._logger.report(
                f"{self._name}.close",
                "tier %r: was not closed after %s s; it is left as it is",
                self._name,
                2 * self._close_timeout_s,
            )

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        there = await super().contains_many(keys)
        self._check_count("contains_many", there, keys)
        return there

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        results = await super().get_many(keys, allocate)
        self._check_count("get_many", results, keys)
        return results

    def _result(self, verb: str, task: asyncio.Task[T]) -> T:
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

    def _check_count(self, verb: str, answers: Sequence[object], asked: Sequence[object]) -> None:
        check_answers(f"tier {self._name!r}: {verb}", answers, len(asked))
