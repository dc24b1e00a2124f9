"""One lookup of one request: asked by the scheduler's thread, answered by the client's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_async.integration.vllm.decide import Verdict
    from lmcache_async.integration.vllm.handover import Promise
    from lmcache_async.integration.vllm.wire import Costs


@dataclass(frozen=True, slots=True)
class Answer:
    """What all ranks have of a request.

    Attributes:
        chunks: Leading full chunks.
        partial_tokens: Tokens of the partial chunk after them; 0 for none.
        partial_keys: Its key, by rank.
        partial_text: Its extra text.
        tiers: Chunks by the id of the tier that has them, of the first rank.
        pinned: Some rank holds leases for it until it is told otherwise.
        resident: Every rank holds leases for all of it: it is in host memory and stays there.
        costs: What loading the full chunks costs, until the slowest rank is done.
    """

    chunks: int = 0
    partial_tokens: int = 0
    partial_keys: tuple[bytes, ...] = ()
    partial_text: str = ""
    tiers: Mapping[str, int] = field(default_factory=dict)
    pinned: bool = False
    resident: bool = False
    costs: Costs = ()

    def hit_tokens(self, chunk_size: int) -> int:
        """Leading tokens that are there."""
        return self.chunks * chunk_size + self.partial_tokens


MISS = Answer()


@dataclass(slots=True, eq=False)
class Lookup:
    """A question on its way.

    Attributes:
        lookup_id: Names its pins; unique.
        num_tokens: Tokens of the request that it asks about.
        epoch: How often the cache had been reset when it was asked; an older one's answer is void.
        asked_at: When, on the monotonic clock.
        preemptions: How often the request had been preempted then.
        answer: Written once, by the client's thread.
        abandoned: Its pins are not wanted; set and read by the client's thread.
        released: The scheduler's thread has given it up.
        timed_out: It was once taken for a miss because its answer was late.
        worth: What was decided: for so many tokens that vLLM has itself, so many are to be loaded up to.
        verdict: The same, and why.
        promise: What a producer says will be there.
        wait_s: How long from `asked_at` on it may be waited for.
        believed: The promise is of this model and this prompt; written before the answer.
        answered_at: When the ranks were last asked, where that was later than `asked_at`.
    """

    lookup_id: str
    num_tokens: int
    epoch: int
    asked_at: float
    preemptions: int
    answer: Answer | None = None
    abandoned: bool = False
    released: bool = False
    timed_out: bool = False
    worth: tuple[int, int] | None = None
    verdict: Verdict | None = None
    promise: Promise | None = None
    wait_s: float = 0.0
    believed: bool = False
    answered_at: float = 0.0
