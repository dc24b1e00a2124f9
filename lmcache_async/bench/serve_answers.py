"""What a vLLM answered, and whether it is what another one answered."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.errors import LMCacheAsyncError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOLERANCES = {"float32": 1e-3}
"""Of log-probabilities, by the model's type. One wrong block changes them by far more than 0.1."""

ROUGH_TOLERANCE = 0.1


class ServeError(LMCacheAsyncError):
    """A vLLM did not start, ended, answered wrongly or missed what it had to have; figures would mean nothing."""


def first_line(error: ServeError) -> str:
    """Without the end of a log."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to.

    Attributes:
        sent: Seconds since its operation began.
        times: When each token came, on the same clock.
        logprobs: For each generated place the best tokens and their log-probabilities.
        cached_tokens: Prompt tokens that were not computed, by vLLM's count.
    """

    sent: float
    times: Sequence[float]
    tokens: Sequence[int]
    logprobs: Sequence[Mapping[str, float]]
    cached_tokens: int
    finish_reason: str

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times[0] - self.sent)

    @property
    def gaps_ms(self) -> list[float]:
        """Between each token and the next."""
        return [1e3 * (after - before) for before, after in itertools.pairwise(self.times)]


def difference(answer: Answer, reference: Answer, tolerance: float) -> float:
    """The largest difference of a log-probability; infinite where tokens differ.

    Greedy tokens that are as likely as each other within the tolerance may change places; what comes after
    them is not compared.
    """
    if len(answer.tokens) != len(reference.tokens):
        return math.inf
    largest = 0.0
    for place, (ours, theirs) in enumerate(zip(answer.logprobs, reference.logprobs, strict=True)):
        shared = ours.keys() & theirs.keys()
        if not shared:
            return math.inf
        largest = max([largest, *(abs(ours[token] - theirs[token]) for token in shared)])
        chosen, expected = str(answer.tokens[place]), str(reference.tokens[place])
        if chosen != expected:
            tie = abs(theirs[expected] - theirs.get(chosen, -math.inf)) <= tolerance
            return largest if tie else math.inf
    return largest


def check_same(what: str, answer: Answer, reference: Answer, dtype: str) -> None:
    """That an answer is that of a vLLM without a connector.

    Raises:
        ServeError: It is not.
    """
    tolerance = TOLERANCES.get(dtype, ROUGH_TOLERANCE)
    if answer.finish_reason != reference.finish_reason:
        raise ServeError(f"{what}: the request ended with {answer.finish_reason!r}")
    apart = difference(answer, reference, tolerance)
    if apart > tolerance:
        raise ServeError(
            f"{what}: the answer differs from that without a connector: tokens {list(answer.tokens)} and"
            f" {list(reference.tokens)}, log-probabilities by {apart:.3g}"
        )


def check_cached(what: str, answer: Answer, *, least: int, most: int) -> None:
    """That as many prompt tokens as there should be were not computed.

    Raises:
        ServeError: There were more or fewer.
    """
    if not least <= answer.cached_tokens <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise ServeError(f"{what}: {answer.cached_tokens} tokens came from a cache, which had to be {wanted}")
