"""Load a hit, or compute it: whichever is sooner."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.observability.rates import CostLine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_async.integration.vllm.lookups import Answer, Lookup
    from lmcache_async.integration.vllm.wire import Costs
    from lmcache_async.types import Decided

MIN_GAIN = 0.1
"""So much sooner, as a part, computing must be: it takes the device from others, loading does not."""

MIN_STEP_TOKENS = 128
"""Shorter steps are decodes, or too short to tell how fast the model computes prompts."""


class PrefillClock:
    """Times the scheduler's steps.

    Args:
        now: Seconds, monotonic.
        tokens_per_s: Fixed by the user; None learns it.
        overlapped: A step may be planned before the one before it has ended. Then nothing is learnt: whose
            end vLLM tells of is not known.
    """

    def __init__(
        self, now: Callable[[], float], tokens_per_s: float | None = None, *, overlapped: bool = False
    ) -> None:
        self.now = now
        self._line = CostLine()
        self._fixed = tokens_per_s
        self._learns = tokens_per_s is None and not overlapped
        self._step: tuple[float, int] | None = None

    def begin(self, tokens: int) -> None:
        """A step of so many tokens was planned."""
        self._step = (self.now(), tokens) if self._learns and tokens >= MIN_STEP_TOKENS else None

    def end(self) -> None:
        """Its results are there."""
        if self._step is not None:
            planned, tokens = self._step
            self._step = None
            self._line.note(tokens, self.now() - planned)

    @property
    def known(self) -> bool:
        return self._fixed is not None or self._line.known

    def seconds(self, tokens: int) -> float:
        """What computing so many tokens of a prompt takes."""
        return tokens / self._fixed if self._fixed is not None else self._line.seconds(tokens)


@dataclass(frozen=True, slots=True)
class Hit:
    """What there is to decide on.

    Attributes:
        costs: Of loading the hit's full chunks.
        tokens: Of the hit, a partial chunk at its end among them.
        local_tokens: Leading tokens that vLLM has itself.
        asked_tokens: Of the request.
    """

    costs: Costs
    tokens: int
    local_tokens: int
    asked_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided.

    Attributes:
        tokens: Leading tokens that are worth loading.
        why: In words.
    """

    decided: Decided
    tokens: int
    why: str


MISS = "no tier has a prefix of it"
LOCAL = "vLLM's own prefix cache has as much of it as the tiers"


class LoadDecider:
    """Decides for each hit how much of it is loaded, and counts: load, recompute or partial.

    Args:
        always: Load whatever there is.
    """

    def __init__(self, prefill: PrefillClock, chunk_size: int, *, always: bool = False) -> None:
        self._logger = LimitedLogger(logging.getLogger(__name__), clock=prefill.now)
        self.prefill = prefill
        self.counts: Counter[str] = Counter()
        self._chunk_size = chunk_size
        self._always = always

    def worth(self, request: Any, lookup: Lookup, answer: Answer, local_tokens: int) -> int:
        """Leading tokens of the request's hit that are worth loading.

        Decided once for each lookup and number of tokens that vLLM has itself, however often it asks.
        """
        if lookup.worth is None or lookup.worth[0] != local_tokens:
            tokens = answer.hit_tokens(self._chunk_size)
            hit = Hit(answer.costs, tokens, local_tokens, request.num_tokens)
            promised = lookup.believed
            lookup.verdict = self.verdict(request.request_id, hit, promised=promised)
            lookup.worth = local_tokens, lookup.verdict.tokens
        return lookup.worth[1]

    def decide(self, request_id: str, hit: Hit, *, promised: bool = False) -> int:
        """All of the hit's tokens, only those that vLLM has itself, or up to where a tier's run ends.

        Args:
            promised: Another vLLM has computed it for this one, which is there to decode: it is loaded.
        """
        return self.verdict(request_id, hit, promised=promised).tokens

    def verdict(self, request_id: str, hit: Hit, *, promised: bool = False) -> Verdict:
        """The same, and why."""
        if hit.tokens <= hit.local_tokens:
            return Verdict("local", hit.tokens, LOCAL) if hit.tokens else Verdict("miss", 0, MISS)
        chosen, times, why = hit.tokens, {hit.tokens: 0.0}, self._unasked(promised)
        if not (self._always or promised) and self.prefill.known:
            times = {tokens: self._seconds(hit, tokens) for tokens in self._candidates(hit)}
            best = min(times, key=lambda tokens: (times[tokens], -tokens))
            if times[best] < (1 - MIN_GAIN) * times[hit.tokens]:
                chosen = best
        decided: Literal["load", "recompute", "partial"] = (
            "load" if chosen == hit.tokens else "partial" if chosen > hit.local_tokens else "recompute"
        )
        self.counts[decided] += 1
        if decided != "load":
            self._explain(decided, request_id, hit, chosen, times)
        return Verdict(decided, chosen, why or _in_words(decided, hit, chosen, times))

    def _unasked(self, promised: bool) -> str:
        """Why no times were compared; "" where they were."""
        if promised:
            return "another vLLM has computed it for this one"
        if self._always:
            return "vllm.load_policy is always"
        return "" if self.prefill.known else "how fast the model computes is not known yet"

    def _candidates(self, hit: Hit) -> list[int]:
        ends = [chunks * self._chunk_size for chunks, _ in hit.costs]
        return [hit.local_tokens, *(end for end in ends if hit.local_tokens < end < hit.tokens), hit.tokens]

    def _seconds(self, hit: Hit, tokens: int) -> float:
        """Until the request's first token, if so many leading tokens are there."""
        load = 0.0
        if tokens > hit.local_tokens:
            size = self._chunk_size
            load = seconds_up_to(hit.costs, tokens / size) - seconds_up_to(
                hit.costs, hit.local_tokens // size
            )
        return load + self.prefill.seconds(hit.asked_tokens - tokens)

    def _explain(self, decided: str, request_id: str, hit: Hit, chosen: int, times: dict[int, float]) -> None:
        self._logger.log(
            logging.INFO,
            decided,
            "request %s: decided=%s: of %d tokens of a hit %d are loaded: the first token after %.3f s, after %.3f s with all of them",
            request_id,
            decided,
            hit.tokens,
            chosen,
            times[chosen],
            times[hit.tokens],
        )


def _in_words(decided: Decided, hit: Hit, chosen: int, times: Mapping[int, float]) -> str:
    """What was compared."""
    all_of_it, none = times[hit.tokens], times[hit.local_tokens]
    first = f"{times[chosen]:.3f} s to the first token"
    if decided == "load":
        return f"{first}, {none:.3f} s without loading"
    if decided == "recompute":
        return f"{first}, {all_of_it:.3f} s with all {hit.tokens - hit.local_tokens} tokens loaded"
    return f"{first}, {all_of_it:.3f} s with all of the hit loaded, {none:.3f} s with nothing"


def seconds_up_to(costs: Costs, chunks: float) -> float:
    """Seconds to load so many leading chunks; within a run in proportion."""
    before, before_s = 0, 0.0
    for end, end_s in costs:
        if chunks <= end:
            return min(end_s, before_s + (end_s - before_s) * (chunks - before) / (end - before))
        before, before_s = end, end_s
    return before_s


def slowest(costs: Sequence[Costs], chunks: int) -> Costs:
    """What a load of the first `chunks` chunks costs when every rank has to be done."""
    ends = sorted({min(end, chunks) for each in costs for end, _ in each} - {0})
    return tuple((end, max(seconds_up_to(each, end) for each in costs)) for end in ends)
