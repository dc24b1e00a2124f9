"""Questions to a vLLM, its answers, and how far two of them are apart."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.demo.connectors import tokens_by_tier
from tests.integration.model_families import VOCABULARY

# vLLM's cold answer and the one from its own prefix cache differ by up to 4e-6; with a wrong block by far
# more than 1e-1.
TOLERANCE = 1e-4
# In bfloat16 an answer of plain vLLM depends on what else is in its batch, on CPUs with AMX: by up to 0.07.
BFLOAT16_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Image:
    """A square of noise.

    Attributes:
        side: Its width and height in pixels.
        uuid: Sent with it as its identity; without one vLLM finds a name itself.
    """

    seed: int
    side: int
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Generated tokens are greedy and never end early.

    Attributes:
        images: In the order of their placeholders in the prompt.
        processor: The request's `mm_processor_kwargs`.
        adapter: Directory of a LoRA adapter.
        reloads: VLLM loads the adapter again, because its files have changed.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 8
    cache_salt: str = ""
    params: Mapping[str, Any] | None = None
    images: tuple[Image, ...] = ()
    processor: Mapping[str, Any] | None = None
    adapter: str = ""
    reloads: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request.

    Attributes:
        cached_tokens: Prompt tokens that were not computed, by vLLM's count.
        logprobs: For each generated place the best tokens and their log-probabilities.
        kv_transfer_params: What another vLLM needs to go on from here.
        seconds: From when vLLM was given the request to its end.
        log: What was logged until its end.
    """

    cached_tokens: int
    finish_reason: str
    tokens: list[int]
    logprobs: list[dict[str, float]]
    seconds: float
    kv_transfer_params: Mapping[str, Any] | None = None
    log: str = ""

    @property
    def tiers(self) -> dict[str, int]:
        """Tokens that were loaded, by tier."""
        return dict(tokens_by_tier(self.log))


def tokens(seed: str, count: int) -> tuple[int, ...]:
    """Random token ids."""
    generator = random.Random(seed)
    return tuple(generator.randrange(3, VOCABULARY) for _ in range(count))


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a log-probability; infinite where tokens differ."""
    if one.tokens != other.tokens:
        return math.inf
    largest = 0.0
    for token, ours, theirs in zip(one.tokens, one.logprobs, other.logprobs, strict=True):
        both = ours.keys() & theirs.keys()
        if str(token) not in both or len(both) < 4:  # the fifth may change places with the sixth
            return math.inf
        largest = max([largest, *(abs(ours[name] - theirs[name]) for name in both)])
    return largest


def assert_same(answer: Answer, reference: Answer, tolerance: float = TOLERANCE) -> None:
    assert answer.finish_reason == "length"
    assert answer.tokens == reference.tokens
    assert difference(answer, reference) <= tolerance
