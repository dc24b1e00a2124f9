"""The outermost layer of a tier: its deadline, and the checks of the tier contract around its layers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from lmcache_async.errors import LMCacheAsyncError, TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.answers import release_answers
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.border import Border, ContractError, flag, flags, number, read
from lmcache_async.tiers.layers.deadline import BoundedLayer
from lmcache_async.types import ChunkKey

T = TypeVar("T")


class GuardLayer(BoundedLayer):
    """Deadline of one tier, and contract checks of its layers. Every tier has it, outside all other layers.

    The checks of `BorderLayer` on the tier are repeated here on the layers, which may be third-party code
    too.

    Args:
        inner: The tier.
        name: Tier id, for messages.
        timeout_s: Deadline of a call in seconds.
        close_timeout_s: Seconds that closing waits for abandoned calls, and then for the tier; at most
            `timeout_s`, which is also the default.
        open_timeout_s: Deadline of opening in seconds.
        logger: Logger for unexpected errors of the tier, one line per cause.
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
        super().__init__(inner, name=name, lookup_s=timeout_s, read_s=timeout_s, write_s=timeout_s)
        self._border = Border(name, logger)
        self._close_timeout_s = timeout_s if close_timeout_s is None else min(timeout_s, close_timeout_s)
        self._logger = logger
        self._open_timeout_s = open_timeout_s

    async def __aenter__(self) -> Self:
        """Open the tier.

        Raises:
            TierUnavailableError: It was not open within `open_timeout_s`.
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
        """Close the tier. A failure or a timeout is logged, and the tier is abandoned."""

        def close() -> Coroutine[Any, Any, None]:
            return BoundedLayer.__aexit__(self, kind, error, trace)

        try:
            async with asyncio.timeout(2 * self._close_timeout_s):
                try:
                    await self.drain(timeout_s=self._close_timeout_s)
                finally:
                    await self._border.call("closing", close, lambda _: None)
        except LMCacheAsyncError as failure:
            self._border.report("closing", f"closing failed: {describe(failure)}")
        except TimeoutError:
            self._logger.report(
                f"{self._name}.close",
                "tier %r: was not closed after %s s; it is left as it is",
                self._name,
                2 * self._close_timeout_s,
            )

    async def contains(self, key: ChunkKey) -> bool:
        return self._checked("contains", await super().contains(key), flag)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        found = await super().count_prefix(keys)
        return self._checked("count_prefix", found, lambda verb, answer: number(verb, answer, len(keys)))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        there = await super().contains_many(keys)
        return self._checked("contains_many", there, lambda verb, answers: flags(verb, answers, len(keys)))

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return self._checked("get", await super().get(key, allocate), read)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        answers = await super().get_many(keys, allocate)
        try:
            return self._checked(
                "get_many", answers, lambda verb, given: self._border.reads(verb, given, len(keys))
            )
        except TierError:
            release_answers(answers)
            raise

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        answers = await super().put_many(items)
        return self._checked(
            "put_many", answers, lambda verb, given: self._border.outcomes(verb, given, len(items))
        )

    def _checked(self, verb: str, answer: object, check: Callable[[str, object], T]) -> T:
        try:
            return check(verb, answer)
        except ContractError as error:
            raise self._border.failure(verb, error) from None

    def _result(self, verb: str, task: asyncio.Task[T]) -> T:
        try:
            return super()._result(verb, task)
        except BaseException as error:  # noqa: BLE001  # of an ended task, so it is no cancellation of this task
            failure = self._border.failure(verb, error)
            raise failure from failure.__cause__
