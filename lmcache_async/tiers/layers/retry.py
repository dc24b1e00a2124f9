"""Retries with exponential backoff and jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from pydantic import model_validator

from lmcache_async.config.validation import disagree
from lmcache_async.config.values import Count, OptionalSeed, Seconds
from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.answers import check_answers, memory_was_short, release_answers
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.layers.around import AroundLayer, Call
from lmcache_async.tiers.layers.base import LayerConfig, LayerContext, LayerStatistics
from lmcache_async.types import ChunkKey

T = TypeVar("T")


class RetryConfig(LayerConfig):
    """Options of the retry layer.

    Attributes:
        attempts: How often a call is made at most, the first time included.
        base_s: The longest pause before the second attempt; it doubles with each one, in seconds.
        max_s: What it never exceeds.
        seed: Of the pauses' lengths; none means others in each process, which is what jitter is for.
    """

    attempts: Count = 3
    base_s: Seconds = 0.05
    max_s: Seconds = 1.0
    seed: OptionalSeed = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.base_s > self.max_s:
            raise disagree(f"base_s is {self.base_s}, above max_s of {self.max_s}", "base_s", "max_s")
        return self


@dataclass(frozen=True, slots=True)
class RetryStatistics(LayerStatistics):
    """Statistics of the retries of a tier.

    Attributes:
        retries: Further attempts, one for each repeated call.
        recovered: Chunks for which a further attempt succeeded; for calls without chunks, the calls.
        exhausted: Calls that still failed, wholly or in part, after the last attempt or at the deadline.
    """

    retries: int
    recovered: int
    exhausted: int


class RetryLayer(AroundLayer):
    """Repeats what failed with a retryable error, as TierUnavailableError is; of a batch only what failed.

    Pauses grow exponentially with full jitter: each is uniformly distributed between 0 and its bound, so that
    many clients of one backend do not retry at the same moment (Marc Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 4 March 2015). No pause begins that would end after the tier's
    `timeout_s`. A cancelled call ends at once, also in a pause.

    Args:
        inner: The tier.
        options: Options of the layer.
        context: Context of the layer.
        dice: Random generator of the pauses; by default seeded with `options.seed`.
    """

    options_type = RetryConfig

    def __init__(
        self, inner: Tier, options: RetryConfig, context: LayerContext, *, dice: random.Random | None = None
    ) -> None:
        super().__init__(inner, options, context)
        self._retry = options
        self._dice = dice or random.Random(options.seed)  # None: seeded by the operating system
        self._retries = 0
        self._recovered = 0
        self._exhausted = 0

    def layer_statistics(self) -> RetryStatistics:
        return RetryStatistics(retries=self._retries, recovered=self._recovered, exhausted=self._exhausted)

    async def around(self, call: Call, run: Callable[[], Awaitable[T]]) -> T:
        pauses = _Pauses(self._retry, self._dice, self.context.timeout_s)
        while True:
            try:
                result = await run()
            except TierError as error:
                if not (_is_retryable(error) and await self._again(pauses)):
                    raise
            else:
                self._recovered += pauses.taken > 0
                return result

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        async def ask(positions: Sequence[int]) -> list[Buffer | TierError | None]:
            return await self.inner.get_many([keys[position] for position in positions], allocate)

        return await self._batch("get_many", len(keys), ask)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        async def ask(positions: Sequence[int]) -> list[TierError | None]:
            return await self.inner.put_many([items[position] for position in positions])

        return await self._batch("put_many", len(items), ask)

    async def _batch(
        self, verb: str, count: int, ask: Callable[[Sequence[int]], Awaitable[list[T | TierError | None]]]
    ) -> list[T | TierError | None]:
        pauses = _Pauses(self._retry, self._dice, self.context.timeout_s)
        results: list[T | TierError | None] = [None] * count
        left: Sequence[int] = range(count)
        try:
            while True:
                try:
                    answers = await ask(left)
                    check_answers(verb, answers, len(left))
                except TierError as error:
                    if len(left) == count and not _is_retryable(error):
                        raise
                    answers = [error] * len(left)
                if len(left) == count:
                    results = answers
                else:
                    for position, answer in zip(left, answers, strict=True):
                        results[position] = answer
                failed = [position for position in left if _is_retryable(results[position])]
                self._recovered += (len(left) - len(failed)) if pauses.taken else 0
                if not failed or not await self._again(pauses):
                    return results
                left = failed
        except BaseException:
            release_answers(results)
            raise

    async def _again(self, pauses: _Pauses) -> bool:
        """Wait for the next attempt. Return False if there is none."""
        pause_s = pauses.next()
        if pause_s is None:
            self._exhausted += 1
            return False
        await asyncio.sleep(pause_s)
        self._retries += 1
        return True


class _Pauses:
    """Pauses of one call. The deadline starts when the object is created."""

    def __init__(self, options: RetryConfig, dice: random.Random, timeout_s: float) -> None:
        self._options = options
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._give_up_at = self._loop.time() + timeout_s
        self.taken = 0

    def next(self) -> float | None:
        """Return the seconds to wait before the next attempt; None if no attempt or no time is left."""
        if self.taken + 1 >= self._options.attempts:
            return None
        # The exponent is capped to prevent an overflow of the float; 2 ** 60 exceeds every bound in use.
        bound = min(self._options.max_s, self._options.base_s * 2.0 ** min(self.taken, 60))
        pause_s = self._dice.uniform(0.0, bound)
        if self._loop.time() + pause_s >= self._give_up_at:
            return None
        self.taken += 1
        return pause_s


def _is_retryable(answer: object) -> bool:
    """Return whether to retry. Not if memory was short: the retry would hold memory and wait for more."""
    return isinstance(answer, TierError) and answer.retryable and not memory_was_short(answer)
