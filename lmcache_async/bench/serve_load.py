"""What is sent at the same time, and what its answers come to: throughput, and how evenly tokens come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from lmcache_async.bench.serve_answers import Answer

SHORT_TOKENS = 66


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        max_tokens: As many are generated.
        after: It is sent when those that were sent at once have given so many tokens together; 0: at once.
    """

    prompt: Sequence[int]
    max_tokens: int
    after: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """A mixed load: streams that only decode, and prompts that come meanwhile.

    Prompts come as the streams advance, not by the clock: so every vLLM has the same number of prompts within
    the same number of decoded tokens, however fast it is, and throughput is not that of the clock.

    Attributes:
        streams: Requests that decode from the first moment to the last.
        stream_tokens: Tokens that each of them generates.
        new: Prompts that nobody has seen before.
        repeated: Prompts that were there before.
        prompt_tokens: Tokens of each prompt.
    """

    streams: int
    stream_tokens: int
    new: int
    repeated: int
    prompt_tokens: int
    answer_tokens: int = 4

    def moments(self, chosen: random.Random) -> list[tuple[int, bool]]:
        """For each prompt how many tokens the streams have given when it comes, and whether it is a new one.

        The prompts are spread evenly over all but the beginning and the end; which is new is drawn.
        """
        kinds = [True] * self.new + [False] * self.repeated
        chosen.shuffle(kinds)
        tokens = self.streams * self.stream_tokens
        first, last = tokens // 10, tokens * 9 // 10
        step = (last - first) / max(len(kinds), 1)
        return [(max(1, int(first + step * number)), new) for number, new in enumerate(kinds)]


def prompt(chosen: random.Random, count: int, vocabulary: int) -> list[int]:
    """Random token ids, no special ones among them."""
    return [chosen.randrange(3, vocabulary) for _ in range(count)]


def mixed(
    mix: Mix, repeated: Sequence[Sequence[int]], chosen: random.Random, vocabulary: int
) -> list[Request]:
    """One load, the streams first. `repeated` are the prompts that were there before."""
    requests = [
        Request(prompt(chosen, SHORT_TOKENS, vocabulary), mix.stream_tokens) for _ in range(mix.streams)
    ]
    known = iter(repeated)
    for after, new in mix.moments(chosen):
        tokens = prompt(chosen, mix.prompt_tokens, vocabulary) if new else next(known)
        requests.append(Request(tokens, mix.answer_tokens, after))
    return requests


def tokens_per_second(requests: Sequence[Request], answers: Sequence[Answer]) -> float:
    """Tokens of prompts and answers, from the first request sent to the last token."""
    tokens = sum(len(request.prompt) for request in requests) + sum(len(answer.tokens) for answer in answers)
    start = min(answer.sent for answer in answers)
    return tokens / (max(answer.times[-1] for answer in answers) - start)


def gap_ms(answers: Sequence[Answer], part: float) -> float:
    """Milliseconds between a token and the next that no more than 1 - `part` of all gaps exceed.

    At least a microsecond: tokens that a busy machine reads at once have no gap that others could be compared with.
    """
    return max(percentile([gap for answer in answers for gap in answer.gaps_ms], part), 1e-3)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of all values do not exceed.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a percentile of nothing")
    return sorted(values)[max(math.ceil(part * len(values)), 1) - 1]
