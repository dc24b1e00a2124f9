"""Statistics of an engine: a snapshot of its parts, for callers and for its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_async.memory.arena import ArenaStatistics
from lmcache_async.memory.budget import BudgetStatistics
from lmcache_async.metrics.samples import Samples
from lmcache_async.tiers.base import TierStatistics
from lmcache_async.tiers.middleware.base import LayerStatistics
from lmcache_async.tiers.middleware.breaker import BreakerStatistics
from lmcache_async.tiers.middleware.limit import LimitStatistics
from lmcache_async.tiers.middleware.retry import RetryStatistics
from lmcache_async.tiers.writer import WriterStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of an engine.

    Attributes:
        arena: Statistics of host memory.
        tiers: Statistics of each tier, by tier id.
        writers: Statistics of the write queue of each slower tier, by tier id.
        layers: Statistics of the layers around each tier, by tier id and layer id.
        counts: Events of the tiers since the engine was opened, by "<tier id>.<event>" or
            "<tier id>.<event>.<cause>".
        pinned_chunks: Chunks pinned by lookups.
        running: Running stores, retrieves, prefetches and measurements of load times.
        late_calls: Abandoned calls of tiers that have not ended. They keep their leases
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

    def add_to(self, out: Samples) -> None:
        """Add the values of this snapshot to the samples of the engine's metrics."""
        out.add("running", self.running)
        out.add("pinned_chunks", self.pinned_chunks)
        out.add("late_calls", self.late_calls)
        arena = self.arena
        out.add("arena_bytes", arena.num_slabs * arena.slab_bytes)
        out.add("arena_leased_bytes", arena.leased_slabs * arena.slab_bytes)
        out.add("arena_peak_leased_bytes", arena.peak_leased_slabs * arena.slab_bytes)
        out.add("arena_lingering_bytes", arena.lingering_slabs * arena.slab_bytes)
        out.add("arena_pinned_bytes", arena.pinned_bytes)
        out.add("arena_waiting", arena.waiting)
        out.add("arena_timeouts_total", arena.timeouts)
        out.add("arena_reclaimed_slabs_total", arena.reclaimed_slabs)
        for tier, statistics in self.tiers.items():
            _add_tier(out, tier, statistics)
        for tier, writer in self.writers.items():
            out.add("queue_chunks", writer.queued_chunks, tier)
            out.add("queue_bytes", writer.queued_bytes, tier)
            out.add("queue_max_bytes", writer.max_bytes, tier)
            out.add("queue_refused_chunks_total", writer.refused, tier)
        for tier, layers in self.layers.items():
            for layer in layers.values():
                _add_layer(out, tier, layer)


CIRCUIT_STATES = {"closed": 0, "half-open": 1, "open": 2}
"""Values of `lmcache_async_breaker_state`."""


def _add_tier(out: Samples, tier: str, statistics: TierStatistics) -> None:
    if not statistics.common:  # ranks are added up, so the daemon reports a store that all ranks share
        out.add("tier_chunks", statistics.chunks, tier)
        out.add("tier_bytes", statistics.bytes, tier)
        if statistics.max_bytes is not None:
            out.add("tier_max_bytes", statistics.max_bytes, tier)
        out.add("tier_evictions_total", statistics.evictions, tier)
    for cause, count in statistics.corrupt_by_cause.items():
        out.add("corrupt_records_total", count, tier, cause, "tier")
    if rest := statistics.corrupt - sum(statistics.corrupt_by_cause.values()):
        out.add("corrupt_records_total", rest, tier, "unknown", "tier")


def _add_layer(out: Samples, tier: str, layer: LayerStatistics) -> None:
    match layer:
        case RetryStatistics():
            out.add("retries_total", layer.retries, tier)
            out.add("retry_recovered_total", layer.recovered, tier)
            out.add("retry_exhausted_total", layer.exhausted, tier)
        case BreakerStatistics():
            circuits = {"lookup": layer.lookup, "read": layer.read, "write": layer.write}
            for name, circuit in circuits.items():
                out.add("breaker_state", CIRCUIT_STATES[circuit.state], tier, name)
                out.add("breaker_opened_total", circuit.opened, tier, name)
                out.add("breaker_refused_total", circuit.refused, tier, name)
        case LimitStatistics():
            _add_limit(out, tier, "calls", layer.calls)
            _add_limit(out, tier, "bytes", layer.bytes)


def _add_limit(out: Samples, tier: str, of: str, budget: BudgetStatistics | None) -> None:
    if budget is not None:
        out.add("limit_used", budget.used_bytes, tier, of)
        out.add("limit_max", budget.max_bytes, tier, of)
        out.add("limit_waiting", budget.waiting, tier, of)
        out.add("limit_waited_total", budget.waited, tier, of)
        out.add("limit_refused_total", budget.refused, tier, of)
