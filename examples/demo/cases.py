"""Rows of the result table: one kind of request each, over all rounds, compared with vLLM without a connector."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from examples.demo.connectors import tokens_by_tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.demo.client import Answer


@dataclass(slots=True)
class Case:
    ttft_s: list[float] = field(default_factory=list)  # one per round
    # The same requests to their last token, measured by the client.
    seconds: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)  # one per request
    by_tier: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    equal: int = 0
    max_logprob_difference: float = 0.0

    @property
    def median_s(self) -> float | None:
        return median(self.ttft_s) if self.ttft_s else None

    @property
    def hit_tokens(self) -> int:
        """Cached tokens of the request with the fewest."""
        return min(self.cached_tokens, default=0)

    @property
    def tier_share(self) -> dict[str, int]:
        """Tokens from each tier of an average request."""
        return {tier: round(tokens / len(self.cached_tokens)) for tier, tokens in self.by_tier.items()}

    def add(self, answers: Sequence[Answer], reference: Answer | None = None) -> None:
        """Add the answers of one round to one prompt, and compare each with the reference."""
        self.ttft_s.append(median(answer.ttft_s for answer in answers))
        self.seconds.append(median(answer.seconds for answer in answers))
        for answer in answers:
            self.cached_tokens.append(answer.cached_tokens)
            self.by_tier += tokens_by_tier(answer.log)
            if reference is not None:
                self.compared += 1
                self.equal += answer.tokens == reference.tokens
                difference = logprob_difference(answer, reference)
                self.max_logprob_difference = max(self.max_logprob_difference, difference)


@dataclass(slots=True)
class Cases:
    """All cases, with the reference of each, chosen so that on a CPU results must be equal to the last bit.

    A prompt computed in one piece is compared with one computed in one piece, and a prompt whose document came
    from the cache with one whose document came from vLLM's own prefix cache.
    """

    no_connector: Case = field(default_factory=Case)
    cold: Case = field(default_factory=Case)  # with no_connector
    pool: Case = field(default_factory=Case)  # with no_connector: the difference of vLLM from itself
    pool_with_connector: Case = field(default_factory=Case)  # with pool
    warm: Case = field(default_factory=Case)  # with pool
    questions: Case = field(default_factory=Case)  # with pool: other questions about the same document
    pool_at_restart: Case = field(default_factory=Case)  # the same as pool, minutes later
    restart: Case = field(default_factory=Case)  # with pool

    @property
    def judged(self) -> tuple[Case, ...]:
        """Cases whose answers must equal those of vLLM without a connector."""
        return (self.cold, self.pool_with_connector, self.warm, self.questions, self.restart)

    @property
    def hits(self) -> tuple[Case, ...]:
        """Cases whose document must be loaded by the connector."""
        return (self.warm, self.questions, self.restart)

    @property
    def own_difference(self) -> float:
        """Change of log-probabilities by vLLM's own prefix cache, due to other shapes and rounding."""
        return self.pool.max_logprob_difference

    @property
    def max_logprob_difference(self) -> float:
        return max(case.max_logprob_difference for case in self.judged)


def logprob_difference(one: Answer, other: Answer) -> float:
    """Return the largest absolute difference of log-probabilities, up to the first different token."""
    largest = 0.0
    for index, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        if one.tokens[:index] != other.tokens[:index]:
            break
        largest = max([largest, *(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys())])
    return largest
