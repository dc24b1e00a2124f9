"""Retries with exponential backoff and jitter."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from lmcache_async.config.validation import disagree
from lmcache_async.config.values import Count, OptionalSeed, Seconds
from lmcache_async.errors import BudgetExceededError, TierError, TierSuspendedError
from lmcache_async.tiers.middleware.base import (
    Call,
    Layer,
    LayerConfig,
    LayerContext,
    LayerStatistics,
    Next,
    Result,
    Results,
    Verb,
)
from lmcache_async.tiers.results import memory_was_short, no_memory, release_results


class RetryConfig(LayerConfig):
    """Options of the retry layer.

    Attributes:
        attempts: Maximum number of attempts, including the first.
        base_s: Maximum length of the first pause in seconds; doubled for each further pause.
        max_s: Maximum length of any pause in seconds.
        seed: Seed of the random pause lengths; none for different lengths in each process.
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
        recovered: Chunks that a further attempt has read or written, and other calls that succeeded at a further attempt.
        exhausted: Calls that still failed, wholly or in part, after the last attempt or at the deadline.
    """

    retries: int
    recovered: int
    exhausted: int


class RetryLayer(Layer):
    """Repeats calls that failed with a retryable error such as TierUnavailableError; for a batch, only the failed chunks.

    Pauses grow exponentially with full jitter: each is uniformly distributed between 0 and its bound, so that
    many clients of one backend do not retry at the same moment (Marc Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 4 March 2015). No pause begins that would end after the call's deadline. A
    cancelled call ends at once, also in a pause.

    Args:
        options: Options of the layer.
        context: Context of the layer.
        rng: Random generator of the pauses; by default seeded with `options.seed`.
    """

    options_type = RetryConfig
    options: RetryConfig
    bounded = True

    def __init__(
        self, options: RetryConfig, context: LayerContext, *, rng: random.Random | None = None
    ) -> None:
        super().__init__(options, context)
        self._rng = rng or random.Random(options.seed)  # None: seeded by the operating system
        self._retries = 0
        self._recovered = 0
        self._exhausted = 0

    def statistics(self) -> RetryStatistics:
        return RetryStatistics(retries=self._retries, recovered=self._recovered, exhausted=self._exhausted)

    async def around(self, call: Call, next: Next) -> Results:
        per_chunk = call.verb in (Verb.GET_MANY, Verb.PUT_MANY)  # the others succeed or fail as a whole
        attempt, pauses = call, 0
        left: Sequence[int] = range(call.chunks)
        results: list[Result] = []
        failure: TierError | None = None  # of a call that fails as a whole
        try:
            while True:
                answers: Results
                try:
                    answers = await next(attempt)
                except TierError as error:
                    if pauses and isinstance(error, TierSuspendedError):
                        # The breaker is open since the attempt before, whose error is the reason.
                        if failure is not None:
                            raise failure from failure.__cause__
                        return results
                    if attempt is call and not _is_retryable(error):
                        raise
                    if not per_chunk:
                        if not await self._pause(pauses, call.deadline):
                            raise
                        failure = error
                        pauses += 1
                        continue
                    answers = [error] * len(left)
                except BudgetExceededError as error:
                    if attempt is call:
                        raise
                    answers = [no_memory(error)] * len(left)  # the chunks that got memory are usable
                if attempt is call:
                    results = list(answers)
                else:
                    for position, answer in zip(left, answers, strict=True):
                        results[position] = answer
                failed = [position for position in left if isinstance(results[position], TierError)]
                if pauses:
                    self._recovered += len(left) - len(failed) if per_chunk else 1
                left = [position for position in failed if _is_retryable(results[position])]
                if not left or not await self._pause(pauses, call.deadline):
                    return results
                pauses += 1
                attempt = call if len(left) == call.chunks else call.part(left)
        except BaseException:
            release_results(results)
            raise
        finally:
            failure = None  # or the error and this frame would refer to each other

    async def _pause(self, taken: int, deadline: float) -> bool:
        """Wait for the next attempt after `taken` pauses. Return False if no attempt or no time is left."""
        # The exponent is capped to prevent an overflow of the float; 2 ** 60 exceeds every bound in use.
        bound = min(self.options.max_s, self.options.base_s * 2.0 ** min(taken, 60))
        if taken + 1 < self.options.attempts:
            pause_s = self._rng.uniform(0.0, bound)
            if asyncio.get_running_loop().time() + pause_s < deadline:
                await asyncio.sleep(pause_s)
                self._retries += 1
                return True
        self._exhausted += 1
        return False


def _is_retryable(result: object) -> bool:
    """Return whether to retry. A lack of memory is not retried: the retry would hold memory and wait for more."""
    return isinstance(result, TierError) and result.retryable and not memory_was_short(result)
