"""Load of a tier: bytes per second, lifetime of chunks, hit rates and arrival times."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.scale.costs import BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Trace:
    """Reuse in a recorded trace, computed by `python -m tools.scale.reuse`.

    Attributes:
        repeated: Share of prompt tokens that repeat a prefix, if all blocks are kept.
        kept: Pairs of the seconds that a block is kept after its last use, and the remaining share; ascending.
        spread: Standard deviation of the logarithm of prompt lengths: ln(90 % / median) / 1.2816.
    """

    repeated: float
    kept: tuple[tuple[float, float], ...]
    spread: float

    def hits(self, kept_s: float) -> float:
        """Return the share of prompt tokens that is found, linearly interpolated."""
        before = (0.0, 0.0)
        for point in self.kept:
            if kept_s <= point[0]:
                share = (kept_s - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1]


TRACES = {
    "chat": Trace(
        0.374,
        ((10, 0.044), (30, 0.060), (60, 0.105), (120, 0.195), (300, 0.293), (600, 0.350), (3600, 0.374)),
        math.log(27367 / 6909) / 1.2816,
    ),
    "agents": Trace(
        0.964,
        ((10, 0.122), (30, 0.612), (60, 0.754), (120, 0.846), (300, 0.916), (600, 0.936), (3600, 0.961)),
        math.log(256751 / 101595) / 1.2816,
    ),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the engines.

    Attributes:
        prompt_tokens: Mean length of prompts.
        computed_per_s: Prompt tokens per second that an engine computes and stores.
        max_requests_per_s: Limit of an engine by decoding, independent of hits.
    """

    engines: int = 8
    prompt_tokens: int = 16384
    model: str = "8b"
    trace: str = "chat"
    computed_per_s: float = 10_000.0
    max_requests_per_s: float = 4.0
    chunk_tokens: int = 256
    pool_bytes: float = 1e12

    @property
    def token_bytes(self) -> int:
        return BYTES_PER_TOKEN[self.model]

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.token_bytes

    @property
    def kept_s(self) -> float:
        """Return how long a full pool keeps an unused block: until its size in new blocks was stored."""
        return self._kept_s(self.hits)

    @property
    def hits(self) -> float:
        """Return the share of prompt tokens that is found: the smallest fixed point with the lifetime of blocks."""
        trace, hits = TRACES[self.trace], 0.0
        for _ in range(100):  # increases monotonically and is bounded
            hits = trace.hits(self._kept_s(hits))
        return hits

    def _kept_s(self, hits: float) -> float:
        asked_per_s = self.max_requests_per_s * self.prompt_tokens * (1 - hits)
        stored_per_s = min(self.computed_per_s, asked_per_s) * self.token_bytes
        return self.pool_bytes / (self.engines * stored_per_s)

    @property
    def requests_per_s(self) -> float:
        """Return the requests per second of all engines."""
        each = self.computed_per_s / (self.prompt_tokens * (1 - self.hits))
        return self.engines * min(each, self.max_requests_per_s)

    @property
    def loaded_bytes_per_s(self) -> float:
        return self.requests_per_s * self.prompt_tokens * self.hits * self.token_bytes

    @property
    def stored_bytes_per_s(self) -> float:
        return self.requests_per_s * self.prompt_tokens * (1 - self.hits) * self.token_bytes

    def requests(self, count: int, seed: int) -> Iterator[tuple[float, int, int, int]]:
        """Yield time, engine, chunks to load and chunks to store: Poisson arrivals, lognormal lengths."""
        dice = random.Random(seed)
        spread, hits, rate = TRACES[self.trace].spread, self.hits, self.requests_per_s
        at_s = 0.0
        for _ in range(count):
            at_s += dice.expovariate(rate)
            tokens = self.prompt_tokens * dice.lognormvariate(-(spread**2) / 2, spread)
            chunks = max(1, round(tokens / self.chunk_tokens))
            loaded = round(chunks * hits)
            yield at_s, dice.randrange(self.engines), loaded, chunks - loaded
