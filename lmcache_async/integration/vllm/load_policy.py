"""Decision whether a hit is loaded or computed, from measured times."""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from lmcache_async.logging import LimitedLogger
from lmcache_async.types import Decided

MIN_GAIN = 0.1
"""Minimum gain of computing over loading, as a fraction of the time with the whole hit loaded. Computing occupies the device, which
other requests need."""

MIN_STEP_TOKENS = 128
"""Steps with fewer prompt tokens are too short to measure how fast the model computes prompts."""

MIN_RUNS = 3
"""Runs of steps that must be measured before a hit is computed instead of loaded. The first may include a warm-up."""

_KEPT_RUNS = 16
"""Number of runs from which the rate is computed."""

_MAX_RUN_STEPS = 8
"""Maximum number of steps in a run. A long prompt, or a queue of prompts, is split into several runs."""

_MAX_IN_FLIGHT = 256
"""Maximum number of steps whose end was not reported. vLLM plans at most one step more than the pipeline has stages."""

NO_PREFIX = "no tier has a prefix of the prompt"
LOCAL = "vLLM's own prefix cache has as many tokens of the prompt as the tiers"


Costs: TypeAlias = tuple[tuple[int, float], ...]
"""For each run of chunks in one tier: the number of chunks up to its end, and the seconds to load all of them.
Both ascend."""
_COST = struct.Struct("<qd")


def pack_costs(costs: Costs) -> bytes:
    return b"".join(_COST.pack(*cost) for cost in costs)


def unpack_costs(packed: object, chunks: int) -> Costs:
    """Read a rank's costs of loading its hit of `chunks` chunks; empty if they are not known.

    Raises:
        ValueError: The costs are invalid.
    """
    if not isinstance(packed, bytes) or len(packed) % _COST.size or len(packed) > chunks * _COST.size:
        raise ValueError(f"a rank answered {packed!r:.40} as costs of {chunks} chunks")
    costs = tuple(_COST.iter_unpack(packed))
    before, before_s = 0, 0.0
    for end, seconds in costs:
        if not (before < end <= chunks and before_s <= seconds < math.inf):
            raise ValueError(f"a rank answered {costs!r:.80} as costs of {chunks} chunks")
        before, before_s = end, seconds
    return costs


def slowest(costs: Sequence[Costs], chunks: int) -> Costs:
    """Return the costs of loading the first `chunks` chunks on all ranks: at each end, those of the slowest rank."""
    ends = sorted({min(end, chunks) for each in costs for end, _ in each} - {0})
    return tuple((end, max(seconds_up_to(each, end) for each in costs)) for end in ends)


def seconds_up_to(costs: Costs, chunks: float) -> float:
    """Seconds to load `chunks` leading chunks, interpolated within a run."""
    before, before_s = 0, 0.0
    for end, end_s in costs:
        if chunks <= end:
            return min(end_s, before_s + (end_s - before_s) * (chunks - before) / (end - before))
        before, before_s = end, end_s
    return before_s


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose end was not reported. `tokens` is its prompt tokens, or 0 if the step is not used for the measurement."""

    number: int
    planned: float
    tokens: int


class PrefillClock:
    """Measures how fast the model computes prompts, from the scheduler's steps.

    Steps may overlap, as with asynchronous scheduling and pipeline parallelism: a step is then planned before the
    ones before it have ended. Steps run and end in the order of their plans, so the time of a step begins when it
    was planned or when the step before it ended, whichever is later. The end of a single step may be noticed late,
    which shortens the time of the next one. Steps that follow each other without a pause are therefore measured as
    one run. The rate is the median of the last runs, weighted by their tokens.

    Args:
        now: Monotonic clock in seconds.
        tokens_per_s: Speed set by the user; None measures it.
    """

    def __init__(self, now: Callable[[], float], tokens_per_s: float | None = None) -> None:
        self.now = now
        self._fixed = tokens_per_s
        self._rate = tokens_per_s or 0.0
        self._number = self._ended_number = 0
        self._in_flight: deque[_Step] = deque(maxlen=_MAX_IN_FLIGHT)
        self._ended = -math.inf
        self._run_steps = self._run_tokens = 0
        self._run_s = 0.0
        self._runs: deque[tuple[float, int]] = deque(maxlen=_KEPT_RUNS)  # tokens per second, tokens

    def begin(self, prompt_tokens: int, tokens: int) -> int:
        """Record that a step was planned. Return its number, for `end`; 0 for a step without tokens."""
        if not tokens:
            return 0
        self._number += 1
        if self._fixed is not None:
            return self._number
        measures = prompt_tokens >= MIN_STEP_TOKENS and 2 * prompt_tokens >= tokens
        self._in_flight.append(_Step(self._number, self.now(), prompt_tokens if measures else 0))
        return self._number

    def end(self, number: int) -> None:
        """Record that a step has ended. Ends of earlier steps that were not reported are lost."""
        self._ended_number = max(self._ended_number, number)
        steps, lost = self._in_flight, False
        while steps and steps[0].number < number:
            steps.popleft()
            lost = True
            self._end_run(complete=False)
        if not steps or steps[0].number != number:
            return
        step, now = steps.popleft(), self.now()
        if step.tokens and not lost:  # otherwise the step may have begun later than is known
            self._run_steps += 1
            self._run_tokens += step.tokens
            self._run_s += now - max(step.planned, self._ended)
        self._ended = now
        if not (steps and steps[0].tokens) or self._run_steps == _MAX_RUN_STEPS:
            self._end_run()

    @property
    def known(self) -> bool:
        return self._rate > 0

    @property
    def idle(self) -> bool:
        """Whether the ends of all steps with tokens were reported."""
        return self._ended_number == self._number

    def seconds(self, tokens: int) -> float:
        """Seconds to compute `tokens` tokens of a prompt; 0 if the rate is not known."""
        return tokens / self._rate if self._rate else 0.0

    def _end_run(self, *, complete: bool = True) -> None:
        if complete and self._run_s > 0:
            self._runs.append((self._run_tokens / self._run_s, self._run_tokens))
            if len(self._runs) >= MIN_RUNS:
                self._rate = _weighted_median(self._runs)
        self._run_steps = self._run_tokens = 0
        self._run_s = 0.0


def _weighted_median(weighted: Iterable[tuple[float, int]]) -> float:
    """The lower median of values given with their weights."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    return next(
        value
        for (value, _), below in zip(ordered, accumulate(weight for _, weight in ordered), strict=True)
        if below >= half
    )


@dataclass(frozen=True, slots=True)
class Hit:
    """Length and costs of a hit."""

    costs: Costs  # of the full chunks
    tokens: int  # including a partial chunk at the end
    local_tokens: int  # in vLLM's own prefix cache
    asked_tokens: int
    divisible: bool = True  # a leading part can be loaded alone


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a hit: how many leading tokens are worth loading, and the reason in words."""

    decided: Decided
    tokens: int
    why: str


class LoadPolicy:
    """Decides how much of a hit is loaded."""

    def __init__(self, prefill: PrefillClock, chunk_size: int, *, always: bool = False) -> None:
        self._logger = LimitedLogger(logging.getLogger(__name__), clock=prefill.now)
        self.prefill = prefill
        self._chunk_size = chunk_size
        self._always = always

    def decide(self, request_id: str, hit: Hit, *, promised: bool = False) -> Decision:
        """Decide to load all of the hit, nothing of it, or the part up to the end of a tier's run.

        A promised hit is loaded, because another vLLM instance has computed it for this one.
        """
        if hit.tokens <= hit.local_tokens:
            return Decision("local", hit.tokens, LOCAL) if hit.tokens else Decision("miss", 0, NO_PREFIX)
        chosen, times, why = hit.tokens, {hit.tokens: 0.0}, self._forced(promised)
        if not why:
            times = {tokens: self._seconds(hit, tokens) for tokens in self._candidates(hit)}
            best = min(times, key=lambda tokens: (times[tokens], -tokens))
            if times[best] < (1 - MIN_GAIN) * times[hit.tokens]:
                chosen = best
        decided: Literal["load", "recompute", "partial"] = (
            "load" if chosen == hit.tokens else "partial" if chosen > hit.local_tokens else "recompute"
        )
        why = why or _comparison(decided, hit, chosen, times)
        if decided != "load":
            self._logger.log(
                logging.INFO,
                decided,
                "request %s: decided=%s: %d of the %d tokens of the hit are used: %s",
                request_id,
                decided,
                chosen,
                hit.tokens,
                why,
            )
        return Decision(decided, chosen, why)

    def _forced(self, promised: bool) -> str:
        """Return the reason for loading the hit without comparing times; "" if they are compared."""
        if promised:
            return "another vLLM instance has computed it for this one"
        if self._always:
            return "vllm.load_policy is always"
        return "" if self.prefill.known else "the prefill speed is not known yet"

    def _candidates(self, hit: Hit) -> list[int]:
        ends = [chunks * self._chunk_size for chunks, _ in hit.costs] if hit.divisible else []
        return [hit.local_tokens, *(end for end in ends if hit.local_tokens < end < hit.tokens), hit.tokens]

    def _seconds(self, hit: Hit, tokens: int) -> float:
        """Seconds until the request's first token, if `tokens` leading tokens are loaded."""
        load = 0.0
        if tokens > hit.local_tokens:
            size = self._chunk_size
            load = seconds_up_to(hit.costs, tokens / size) - seconds_up_to(
                hit.costs, hit.local_tokens // size
            )
        return load + self.prefill.seconds(hit.asked_tokens - tokens)


def _comparison(decided: Decided, hit: Hit, chosen: int, times: Mapping[int, float]) -> str:
    """Return the compared times as a text."""
    all_of_it, none = times[hit.tokens], times[hit.local_tokens]
    first = f"{times[chosen]:.3f} s to the first token"
    if decided == "load":
        return f"{first}, {none:.3f} s without loading"
    if decided == "recompute":
        return f"{first}, {all_of_it:.3f} s with all {hit.tokens - hit.local_tokens} tokens loaded"
    return f"{first}, {all_of_it:.3f} s with all of the hit loaded, {none:.3f} s with nothing"
