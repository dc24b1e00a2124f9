"""What the scheduler half counts: lookups, what was decided, and what loads have saved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.integration.vllm.hits import split_tokens
from lmcache_async.observability.families import Family, Filling, since

if TYPE_CHECKING:
    from lmcache_async.integration.vllm.asking import Asking
    from lmcache_async.integration.vllm.decide import LoadDecider
    from lmcache_async.integration.vllm.loads import Loads
    from lmcache_async.integration.vllm.requests import RequestState
    from lmcache_async.integration.vllm.waiting import WaitCounts

_P = "lmcache_async_"

SCHEDULER_SERIES = (
    Family(
        f"{_P}lookups_total",
        "counter",
        "Lookups of admitted requests: hit: tiers had more than vLLM itself; miss; late: no answer in time;"
        " unneeded: vLLM had it all before the answer came.",
        ("result",),
    ),
    Family(f"{_P}late_lookups_total", "counter", "Lookups whose answer was late at least once."),
    Family(f"{_P}lookup_asked_tokens_total", "counter", "Tokens of admitted requests that vLLM did not have itself."),
    Family(f"{_P}lookup_hit_tokens_total", "counter", "Of these, tokens that the tier had.", ("tier",)),
    Family(f"{_P}load_tokens_total", "counter", "Of these, tokens that were loaded and not computed.", ("tier",)),
    Family(
        f"{_P}decided_total",
        "counter",
        "Hits by what was sooner: load, recompute, or partial (load up to where a slower tier begins).",
        ("decided",),
    ),
    Family(f"{_P}loads_total", "counter", "Loads that were planned."),
    Family(f"{_P}failed_loads_total", "counter", "Loads that failed in part or whole; vLLM computed instead."),
    Family(
        f"{_P}prefill_saved_seconds_total",
        "counter",
        "What computing the loaded tokens would have taken, by the prefill speed measured so far.",
    ),
    Family(f"{_P}prefill_tokens_per_second", "gauge", "How fast the model computes prompts, as measured or configured."),
    Family(
        f"{_P}promises_total",
        "counter",
        "Promises of producers: kept; late: not kept in time; doubted: not of this request.",
        ("became",),
    ),
)  # fmt: skip

_RATE_TOKENS = 1000
"""The prefill speed is told for prompts of this length."""


@dataclass(slots=True)
class _Load:
    asked: int
    local: int
    hit: int
    tiers: dict[str, int]


class Accounts:
    """Counts on the scheduler's thread, at most a few additions a request."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self.lookups: Counter[str] = Counter()
        self.asked_tokens = 0
        self.hit_tokens: Counter[str] = Counter()
        self.loaded_tokens: Counter[str] = Counter()
        self.saved_s = 0.0
        self._loads: dict[str, _Load] = {}
        self._changes = 0
        self._told: tuple[tuple[int, ...], list[Family]] = ((), [])

    def admitted(self, state: RequestState, external_tokens: int) -> None:
        """A request that was looked up got its blocks, and so many tokens are to be loaded."""
        lookup = state.lookup
        if lookup is None or lookup.released:
            return
        self._changes += 1
        asked, local = state.request.num_tokens, state.local_tokens
        self.asked_tokens += asked - local
        if lookup.answer is None:
            self.lookups["late" if lookup.timed_out else "unneeded"] += 1
            return
        hit = min(lookup.answer.hit_tokens(self._chunk_size), asked) - local
        self.lookups["hit" if hit > 0 else "miss"] += 1
        self.hit_tokens.update(split_tokens(lookup.answer.tiers, max(0, hit)))
        if external_tokens:
            tiers = split_tokens(lookup.answer.tiers, external_tokens)
            self._loads[state.chain.request_id] = _Load(asked, local, local + external_tokens, tiers)

    def load_ended(self, request_id: str, decider: LoadDecider, *, failed: bool) -> None:
        """Every rank has ended the request's load."""
        load = self._loads.pop(request_id, None)
        if load is None or failed:
            return
        self._changes += 1
        self.loaded_tokens.update(load.tiers)
        seconds = decider.prefill.seconds
        if decider.prefill.known:
            self.saved_s += max(0.0, seconds(load.asked - load.local) - seconds(load.asked - load.hit))

    def changed(self, decider: LoadDecider, asking: Asking, loads: Loads, waits: WaitCounts) -> list[Family]:
        """What was counted since the last call; a comparison of a few numbers where that is nothing."""
        version = (
            self._changes,
            decider.counts.total(),
            asking.timeouts,
            loads.counts.loads,
            loads.counts.failed_loads,
            waits.kept + waits.late + waits.doubted,
        )
        former, told = self._told
        if version == former:
            return []
        now = self._families(decider, asking, loads, waits)
        self._told = version, now
        return since(now, told)

    def _families(
        self, decider: LoadDecider, asking: Asking, loads: Loads, waits: WaitCounts
    ) -> list[Family]:
        out = Filling(SCHEDULER_SERIES)
        for result, count in {"hit": 0, "miss": 0, **self.lookups}.items():
            out.put(f"{_P}lookups_total", count, result)
        out.put(f"{_P}late_lookups_total", asking.timeouts)
        out.put(f"{_P}lookup_asked_tokens_total", self.asked_tokens)
        for tier, tokens in self.hit_tokens.items():
            out.put(f"{_P}lookup_hit_tokens_total", tokens, tier)
        for tier, tokens in self.loaded_tokens.items():
            out.put(f"{_P}load_tokens_total", tokens, tier)
        for decided, count in {"load": 0, "recompute": 0, "partial": 0, **decider.counts}.items():
            out.put(f"{_P}decided_total", count, decided)
        out.put(f"{_P}loads_total", loads.counts.loads)
        out.put(f"{_P}failed_loads_total", loads.counts.failed_loads)
        out.put(f"{_P}prefill_saved_seconds_total", self.saved_s)
        if decider.prefill.known and (seconds := decider.prefill.seconds(_RATE_TOKENS)) > 0:
            out.put(f"{_P}prefill_tokens_per_second", _RATE_TOKENS / seconds)
        for became in ("kept", "late", "doubted"):
            out.put(f"{_P}promises_total", getattr(waits, became), became)
        return out.families()
