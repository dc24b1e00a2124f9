"""Questions to a vLLM, its answers, and differences between answers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.demo.connectors import tokens_by_tier
from tests.integration.model_families import VOCABULARY

# vLLM's cold answer and the one from its own prefix cache differ by up to 4e-6, and by far more than 1e-1 with a wrong
# block.
TOLERANCE = 1e-4
# In bfloat16, on CPUs with AMX, an answer of plain vLLM depends on the rest of its batch: by up to 0.07.
BFLOAT16_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Image:
    """A square of noise.

    Attributes:
        side: Its width and height in pixels.
        uuid: Identity sent with the image; without one vLLM hashes it.
    """

    seed: int
    side: int
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of noise.

    Attributes:
        frames: Their number.
        width: In pixels.
        height: In pixels.
        fps: Frames per second, on which the positions of tokens depend.
    """

    seed: int
    frames: int
    width: int
    height: int
    fps: float = 2.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Generated tokens are greedy and never end early.

    Attributes:
        images: In the order of their placeholders in the prompt.
        videos: In the order of their placeholders in the prompt.
        processor: The request's `mm_processor_kwargs`.
        adapter: Directory of a LoRA adapter.
        reloads: Whether vLLM loads the adapter again, because its files have changed.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 8
    cache_salt: str = ""
    params: Mapping[str, Any] | None = None
    images: tuple[Image, ...] = ()
    videos: tuple[Video, ...] = ()
    processor: Mapping[str, Any] | None = None
    adapter: str = ""
    reloads: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request.

    Attributes:
        cached_tokens: Prompt tokens that were not computed, by vLLM's count.
        logprobs: The best tokens and their log-probabilities, for each generated position.
        kv_transfer_params: Parameters for another vLLM to continue the request.
        seconds: Duration of the request in vLLM.
        log: Log output until the end of the request.
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
        """Number of loaded tokens by tier."""
        return dict(tokens_by_tier(self.log))


def tokens(seed: str, count: int) -> tuple[int, ...]:
    """Random token ids."""
    generator = random.Random(seed)
    return tuple(generator.randrange(3, VOCABULARY) for _ in range(count))


def difference(one: Answer, other: Answer, tie: float = 0.0) -> float:
    """The largest difference of a log-probability; infinite if tokens differ.

    Args:
        one: An answer.
        other: An answer to the same question.
        tie: Tokens whose log-probabilities differ by at most this may be swapped. Such answers are compared up to there.
    """
    if len(one.tokens) != len(other.tokens):
        return math.inf
    largest = 0.0
    for token, expected, ours, theirs in zip(
        one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True
    ):
        both = ours.keys() & theirs.keys()
        if not {str(token), str(expected)} <= both or len(both) < 4:  # the fifth and the sixth may be swapped
            return math.inf
        largest = max([largest, *(abs(ours[name] - theirs[name]) for name in both)])
        if token != expected:
            return largest if abs(theirs[str(expected)] - theirs[str(token)]) <= tie else math.inf
    return largest


def assert_same(answer: Answer, reference: Answer, tolerance: float = TOLERANCE) -> None:
    assert answer.finish_reason == "length"
    assert difference(answer, reference, tolerance) <= tolerance
