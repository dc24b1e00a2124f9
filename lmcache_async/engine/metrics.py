"""Statistics of an engine, and its metric series.

Nothing here runs per chunk or per request. A reader of the metrics pays for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lmcache_async.engine.tiers import layer_statistics
from lmcache_async.memory.arena import Arena, ArenaStatistics
from lmcache_async.memory.budget import BudgetStatistics
from lmcache_async.observability.families import Family, Filling
from lmcache_async.observability.totals import BUCKETS_S, Durations, Totals
from lmcache_async.tiers.base import TierStatistics
from lmcache_async.tiers.layers.base import LayerStatistics
from lmcache_async.tiers.layers.breaker import BreakerStatistics
from lmcache_async.tiers.layers.limit import LimitStatistics
from lmcache_async.tiers.layers.metrics import BUCKETS_S as CALL_BUCKETS_S
from lmcache_async.tiers.layers.metrics import MetricsStatistics
from lmcache_async.tiers.layers.retry import RetryStatistics
from lmcache_async.tiers.stack import TierStack
from lmcache_async.tiers.writer import WriterStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of an engine.

    Attributes:
        arena: Statistics of host memory.
        tiers: Statistics of each tier, by tier id.
        writers: Statistics of the write queue of each slower tier, by tier id.
        layers: Statistics of the layers around each tier, by tier id and layer id.
        counts: Events since the engine was opened, by "<tier id>.<event>".
        pinned_chunks: Chunks pinned by lookups.
        running: Running stores and retrieves.
        late_calls: Calls of tiers that have not ended although their callers gave up. They keep their leases
            until they end.
        in_arena: Ids of tiers that keep chunks in the arena, without a copy.
    """

    arena: ArenaStatistics
    tiers: Mapping[str, TierStatistics]
    writers: Mapping[str, WriterStatistics]
    layers: Mapping[str, Mapping[str, LayerStatistics]]
    counts: Mapping[str, int]
    pinned_chunks: int
    running: int
    late_calls: int
    in_arena: frozenset[str] = frozenset()

    @classmethod
    def of(cls, arena: Arena, stack: TierStack, *, pinned_chunks: int, running: int) -> EngineStatistics:
        """Take a snapshot."""
        return cls(
            arena=arena.statistics(),
            tiers={stacked.id: stacked.tier.statistics() for stacked in stack.tiers},
            writers={s.id: s.writer.statistics() for s in stack.tiers if s.writer is not None},
            layers={stacked.id: layer_statistics(stacked.tier) for stacked in stack.tiers},
            counts=dict(stack.counts),
            pinned_chunks=pinned_chunks,
            running=running,
            late_calls=stack.late_calls,
            in_arena=frozenset(s.id for s in stack.tiers if not s.leaves_memory),
        )


PREFIX = "lmcache_async_"

CIRCUIT_STATES = {"closed": 0, "half-open": 1, "open": 2}
"""Values of `lmcache_async_breaker_state`."""


def counter(name: str, text: str, *labels: str) -> Family:
    return Family(f"{PREFIX}{name}_total", "counter", text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    return Family(PREFIX + name, "gauge", text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    return Family(PREFIX + name, "histogram", text, labels, (), buckets)


RETRIEVES = (
    counter(
        "retrieves",
        "Retrieves by the reason for their end; complete: all requested chunks were loaded.",
        "ended_by",
    ),
    counter("retrieve_asked_tokens", "Tokens requested by retrieves."),
    counter("retrieve_hit_tokens", "Tokens loaded by retrieves, by the tier they came from.", "tier"),
    counter("retrieve_bytes", "Payload bytes copied to the device."),
    histogram(
        "retrieve_seconds", "Time from the request of a retrieve to the end of its last copy.", BUCKETS_S
    ),
)

STORES = (
    counter("stores", "Finished stores."),
    counter("stored_chunks", "Chunks stored by at least one tier."),
    counter("shared_chunks", "Of these, chunks in a tier that other processes read."),
    counter("stored_tokens", "Tokens of the stored chunks."),
    counter("present_chunks", "Chunks of stores that were present already."),
    counter("dropped_chunks", "Chunks of stores that no tier stored, by cause.", "cause"),
    counter("store_bytes", "Bytes of the records made by stores, including headers."),
    histogram("store_seconds", "Time from the request of a store to the answer of the last tier.", BUCKETS_S),
    histogram("store_copy_seconds", "Time from the request of a store to the last read of device memory.", BUCKETS_S),
)  # fmt: skip

ENGINE = (
    gauge("running", "Running stores and retrieves."),
    gauge("pinned_chunks", "Chunks in host memory pinned by lookups."),
    gauge("late_calls", "Calls of tiers that exceeded their deadline and have not ended yet."),
    gauge("arena_bytes", "Size of the arena in host memory."),
    gauge("arena_leased_bytes", "Leased memory of the arena."),
    gauge("arena_peak_leased_bytes", "Maximum of the leased memory of the arena."),
    gauge("arena_lingering_bytes", "Memory without a lease that an array or a tensor still refers to."),
    gauge("arena_pinned_bytes", "Pinned (page-locked) memory of the arena."),
    gauge("arena_waiting", "Calls waiting for arena memory."),
    counter("arena_timeouts", "Calls that did not get all requested arena memory within their deadline."),
    counter("arena_reclaimed_slabs", "Slabs reclaimed from tiers that keep chunks in the arena."),
)

TIERS = (
    gauge("tier_chunks", "Records in the tier; not reported for stores with other writers.", "tier"),
    gauge("tier_bytes", "Bytes of these records that count against the capacity.", "tier"),
    gauge("tier_max_bytes", "Capacity of the tier, if it is configured there.", "tier"),
    counter("tier_evictions", "Records evicted by the tier.", "tier"),
    counter("tier_hit_chunks", "Chunks read from the tier by retrieves and prefetches.", "tier"),
    counter("tier_stored_chunks", "Chunks stored in the tier.", "tier"),
    counter("tier_promoted_chunks", "Chunks copied into the tier from a slower one.", "tier"),
    counter(
        "tier_dropped_chunks", "Chunks of stores that the tier did not store, by cause.", "tier", "cause"
    ),
    counter("tier_errors", "Failures that were handled as misses, by cause.", "tier", "cause"),
    counter(
        "corrupt_records",
        "Records that failed verification, by cause and by finder: the tier, or the verify stage of a load."
        " Each was a miss.",
        "tier",
        "cause",
        "found_by",
    ),
    gauge("queue_chunks", "Chunks in the write queue or being written.", "tier"),
    gauge("queue_bytes", "Bytes in the write queue or being written.", "tier"),
    gauge(
        "queue_max_bytes",
        "Maximum of the bytes in the write queue: store.max_pending_write_bytes, or less if writing that much takes longer than store.max_pending_write_s. Varies with the measured write rate.",
        "tier",
    ),
    counter(
        "queue_refused_chunks",
        "Chunks refused because the write queue stayed full until their deadline.",
        "tier",
    ),
)

LAYERS = (
    histogram("tier_call_seconds", "Duration of the tier's calls.", CALL_BUCKETS_S, "tier", "verb"),
    gauge("tier_calls_in_flight", "Running calls of the tier.", "tier", "verb"),
    counter("tier_calls_cancelled", "Calls of the tier that were cancelled, at a deadline or before.", "tier", "verb"),
    counter("tier_call_chunks", "Chunks requested in the tier's calls.", "tier", "verb"),
    counter("tier_call_found_chunks", "Of these, chunks that the tier had.", "tier", "verb"),
    counter("tier_call_bytes", "Bytes read or written by the tier.", "tier", "verb"),
    counter("tier_call_errors", "Failed calls and failed chunks of batches, by cause.", "tier", "verb", "cause"),
    counter("retries", "Retries of failed calls.", "tier"),
    counter("retry_recovered", "Chunks, or calls without single chunks, that succeeded in a retry.", "tier"),
    counter("retry_exhausted", "Calls that failed with no attempt or no time left.", "tier"),
    Family(
        PREFIX + "breaker_state",
        "gauge",
        "0 closed: calls pass; 1 half open: a few probes pass; 2 open: no call passes. The worst state of all ranks.",
        ("tier", "circuit"),
        merge="max",
    ),
    counter("breaker_opened", "Openings of the circuit.", "tier", "circuit"),
    counter("breaker_refused", "Calls refused by the circuit.", "tier", "circuit"),
    gauge("limit_used", "Calls or bytes in flight that count against the limit.", "tier", "of"),
    gauge("limit_max", "Maximum of the limit.", "tier", "of"),
    gauge("limit_waiting", "Calls waiting for the limit.", "tier", "of"),
    counter("limit_waited", "Calls that waited for the limit.", "tier", "of"),
    counter("limit_refused", "Calls refused because the limit was not available within their deadline.", "tier", "of"),
)  # fmt: skip

SERIES = (*RETRIEVES, *STORES, *ENGINE, *TIERS, *LAYERS)

_COUNTS = {
    "hits": "tier_hit_chunks",
    "stored": "tier_stored_chunks",
    "promoted": "tier_promoted_chunks",
    "dropped": "tier_dropped_chunks",
    "errors": "tier_errors",
}
"""Series of the tier stack's counts. The last two have a cause."""


class _Named(Filling):
    """Fill series by names without prefix and suffix."""

    def count(self, name: str, value: float, *labels: str) -> None:
        self.put(f"{PREFIX}{name}_total", value, *labels)

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self.put(PREFIX + name, value, *labels)

    def durations(self, name: str, durations: Durations) -> None:
        self.put_counts(PREFIX + name, durations.counts, durations.seconds)


def engine_families(statistics: EngineStatistics, totals: Totals) -> list[Family]:
    """Return all series of an engine that have samples."""
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
    if not told.common:  # ranks are added up, so the daemon reports what all ranks share
        out.gauge("tier_chunks", told.chunks, tier)
        out.gauge("tier_bytes", told.bytes, tier)
        if told.max_bytes is not None:
            out.gauge("tier_max_bytes", told.max_bytes, tier)
        out.count("tier_evictions", told.evictions, tier)
    out.count("retrieve_hit_tokens", 0, tier)  # so that the rate of a tier without hits is 0
    for name in ("tier_hit_chunks", "tier_stored_chunks", "tier_promoted_chunks"):
        out.count(name, 0, tier)
    # An alert on an increase needs a first sample of 0.
    for name in ("tier_dropped_chunks", "tier_errors"):
        out.count(name, 0, tier, "TierUnavailableError")
    out.count("corrupt_records", 0, tier, "checksum", "verify")
    for cause, count in told.corrupt_by_cause.items():
        out.count("corrupt_records", count, tier, cause, "tier")
    if rest := told.corrupt - sum(told.corrupt_by_cause.values()):
        out.count("corrupt_records", rest, tier, "unknown", "tier")


def _counts(out: _Named, counts: Mapping[str, int], tiers: Iterable[str]) -> None:
    """Add the stack's counts, "<tier id>.<event>" or "<tier id>.<event>.<cause>". Ids may contain dots."""
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
            case MetricsStatistics() if not timed:  # the outermost one
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
