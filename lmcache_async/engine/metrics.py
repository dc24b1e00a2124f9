"""An engine's statistics and totals as families of metrics; `series.py` says what each one is.

Nothing here runs for a chunk or for a request: who wants to know asks, and pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lmcache_async.engine.results import EngineStatistics
from lmcache_async.engine.series import CIRCUIT_STATES, PREFIX, SERIES
from lmcache_async.memory.budget import BudgetStatistics
from lmcache_async.observability.families import Family, Filling
from lmcache_async.observability.totals import Durations, Totals
from lmcache_async.tiers.base import TierStatistics
from lmcache_async.tiers.layers.base import LayerStatistics
from lmcache_async.tiers.layers.breaker import BreakerStatistics
from lmcache_async.tiers.layers.limit import LimitStatistics
from lmcache_async.tiers.layers.metrics import MetricsStatistics
from lmcache_async.tiers.layers.retry import RetryStatistics

_COUNTS = {
    "hits": "tier_hit_chunks",
    "stored": "tier_stored_chunks",
    "promoted": "tier_promoted_chunks",
    "dropped": "tier_dropped_chunks",
    "errors": "tier_errors",
}
"""Families of the stack's counts; the last two by cause."""


class _Named(Filling):
    """Fills by names without prefix and suffix."""

    def count(self, name: str, value: float, *labels: str) -> None:
        self.put(f"{PREFIX}{name}_total", value, *labels)

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self.put(PREFIX + name, value, *labels)

    def durations(self, name: str, durations: Durations) -> None:
        self.put_counts(PREFIX + name, durations.counts, durations.seconds)


def engine_families(statistics: EngineStatistics, totals: Totals) -> list[Family]:
    """All series of an engine, as of these two; what has no sample yet is left out."""
    out = _Named(SERIES)
    _retrieves(out, totals)
    _stores(out, totals)
    _engine(out, statistics)
    for tier, told in statistics.tiers.items():
        _tier(out, tier, told)
    _counts(out, statistics.counts, statistics.tiers)
    for tier, writer in statistics.writers.items():
        out.gauge("queue_chunks", writer.queued_chunks, tier)
        out.gauge("queue_bytes", writer.queued_bytes, tier)
        out.gauge("queue_max_bytes", writer.max_bytes, tier)
        out.count("queue_refused_chunks", writer.refused, tier)
    for tier, layers in statistics.layers.items():
        _layers(out, tier, layers.values())
    return out.families()


def _retrieves(out: _Named, totals: Totals) -> None:
    for ended_by, count in {"complete": 0, **totals.retrieves}.items():
        out.count("retrieves", count, ended_by)
    out.count("retrieve_asked_tokens", totals.asked_tokens)
    for tier, tokens in totals.hit_tokens.items():
        out.count("retrieve_hit_tokens", tokens, tier)
    out.count("retrieve_bytes", totals.retrieved_bytes)
    out.durations("retrieve_seconds", totals.retrieve_seconds)


def _stores(out: _Named, totals: Totals) -> None:
    out.count("stores", totals.stores)
    out.count("stored_chunks", totals.stored_chunks)
    out.count("shared_chunks", totals.shared_chunks)
    out.count("stored_tokens", totals.stored_tokens)
    out.count("present_chunks", totals.present_chunks)
    for cause, count in {"deadline": 0, **totals.dropped_chunks}.items():
        out.count("dropped_chunks", count, cause)
    out.count("store_bytes", totals.stored_bytes)
    out.durations("store_seconds", totals.store_seconds)
    out.durations("store_copy_seconds", totals.copy_seconds)


def _engine(out: _Named, statistics: EngineStatistics) -> None:
    out.gauge("running", statistics.running)
    out.gauge("pinned_chunks", statistics.pinned_chunks)
    out.gauge("late_calls", statistics.late_calls)
    arena = statistics.arena
    out.gauge("arena_bytes", arena.num_slabs * arena.slab_bytes)
    out.gauge("arena_leased_bytes", arena.leased_slabs * arena.slab_bytes)
    out.gauge("arena_peak_leased_bytes", arena.peak_leased_slabs * arena.slab_bytes)
    out.gauge("arena_lingering_bytes", arena.lingering_slabs * arena.slab_bytes)
    out.gauge("arena_pinned_bytes", arena.pinned_bytes)
    out.gauge("arena_waiting", arena.waiting)
    out.count("arena_timeouts", arena.timeouts)
    out.count("arena_reclaimed_slabs", arena.reclaimed_slabs)


def _tier(out: _Named, tier: str, told: TierStatistics) -> None:
    if not told.common:  # every rank would tell it, and ranks are added up; the daemon tells it once
        out.gauge("tier_chunks", told.chunks, tier)
        out.gauge("tier_bytes", told.bytes, tier)
        if told.max_bytes is not None:
            out.gauge("tier_max_bytes", told.max_bytes, tier)
        out.count("tier_evictions", told.evictions, tier)
    out.count("retrieve_hit_tokens", 0, tier)  # a rate over a tier that never hit is 0, not nothing
    for name in ("tier_hit_chunks", "tier_stored_chunks", "tier_promoted_chunks"):
        out.count(name, 0, tier)
    # An alert sees a count rise, and nothing where it begins at 1.
    for name in ("tier_dropped_chunks", "tier_errors"):
        out.count(name, 0, tier, "TierUnavailableError")
    out.count("corrupt_records", 0, tier, "checksum", "verify")
    for cause, count in told.corrupt_by_cause.items():
        out.count("corrupt_records", count, tier, cause, "tier")
    if rest := told.corrupt - sum(told.corrupt_by_cause.values()):
        out.count("corrupt_records", rest, tier, "unknown", "tier")


def _counts(out: _Named, counts: Mapping[str, int], tiers: Iterable[str]) -> None:
    """The stack's counts, "<tier id>.<event>" or "<tier id>.<event>.<cause>"; an id may have dots too."""
    ids = sorted(tiers, key=len, reverse=True)
    for name, count in counts.items():
        tier = next((tier for tier in ids if name.startswith(f"{tier}.")), None)
        if tier is None:
            continue
        event, _, cause = name[len(tier) + 1 :].partition(".")
        if event == "corrupt":
            out.count("corrupt_records", count, tier, cause, "verify")
        elif event in _COUNTS:
            out.count(_COUNTS[event], count, *((tier, cause) if cause else (tier,)))


def _layers(out: _Named, tier: str, layers: Iterable[LayerStatistics]) -> None:
    timed = False
    for layer in layers:
        match layer:
            case MetricsStatistics() if not timed:  # of several the outermost: what the engine saw
                timed = True
                _calls(out, tier, layer)
            case RetryStatistics():
                out.count("retries", layer.retries, tier)
                out.count("retry_recovered", layer.recovered, tier)
                out.count("retry_exhausted", layer.exhausted, tier)
            case BreakerStatistics():
                _breaker(out, tier, layer)
            case LimitStatistics():
                _limit(out, tier, "calls", layer.calls)
                _limit(out, tier, "bytes", layer.bytes)


def _calls(out: _Named, tier: str, layer: MetricsStatistics) -> None:
    for verb, told in layer.verbs.items():
        out.put_counts(f"{PREFIX}tier_call_seconds", told.latency, told.seconds, tier, verb)
        out.gauge("tier_calls_in_flight", told.in_flight, tier, verb)
        out.count("tier_calls_cancelled", told.cancelled, tier, verb)
        out.count("tier_call_chunks", told.chunks, tier, verb)
        out.count("tier_call_found_chunks", told.found, tier, verb)
        out.count("tier_call_bytes", told.bytes, tier, verb)
        for cause, count in told.errors.items():
            out.count("tier_call_errors", count, tier, verb, cause)


def _breaker(out: _Named, tier: str, layer: BreakerStatistics) -> None:
    for circuit, told in (("lookup", layer.lookup), ("read", layer.read), ("write", layer.write)):
        out.gauge("breaker_state", CIRCUIT_STATES[told.state], tier, circuit)
        out.count("breaker_opened", told.opened, tier, circuit)
        out.count("breaker_refused", told.refused, tier, circuit)


def _limit(out: _Named, tier: str, of: str, told: BudgetStatistics | None) -> None:
    if told is not None:
        out.gauge("limit_used", told.used_bytes, tier, of)
        out.gauge("limit_max", told.max_bytes, tier, of)
        out.gauge("limit_waiting", told.waiting, tier, of)
        out.count("limit_waited", told.waited, tier, of)
        out.count("limit_refused", told.refused, tier, of)
