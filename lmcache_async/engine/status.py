"""Data of an engine for its status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache_async.config import EngineConfig
from lmcache_async.engine.metrics import EngineStatistics
from lmcache_async.hashing import Namespace
from lmcache_async.metrics.charts import Chart, Sample, Series, gauge_values, page_head, rates, shares
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.metrics.requests import RecentRequests
from lmcache_async.metrics.samples import exposition
from lmcache_async.tiers.middleware.base import LayerStatistics
from lmcache_async.tiers.middleware.breaker import BreakerStatistics

_WINDOW = 10
"""Number of samples over which a share is averaged. A request may be planned during one and loaded during another."""
_LOCAL = "vLLM itself"


class EngineSource:
    """Data of an engine for the status page, `lmcache-async top` and Prometheus."""

    def __init__(
        self,
        config: EngineConfig,
        namespace: Namespace,
        metrics: EngineMetrics,
        statistics: Callable[[], EngineStatistics],
    ) -> None:
        self._chunk_size = config.chunk_size
        self._tiers = [tier.id for tier in config.tiers]
        self._namespace = namespace
        self._metrics = metrics
        self._statistics = statistics
        self._opened = time.time()
        self.recent = RecentRequests()  # an instrument of the engine

    def sample(self) -> Sample:
        statistics, metrics = self._statistics(), self._metrics
        values: dict[str, float] = {
            "prompt": metrics.prompt_tokens,
            "local": metrics.local_tokens,
            "loaded": metrics.retrieved_bytes.value,
            "stored": metrics.stored_bytes.value,
        }
        values |= {f"hit.{tier}": metrics.tier(tier).hit_tokens.value for tier in self._tiers}
        values["leased"] = statistics.arena.leased_slabs * statistics.arena.slab_bytes
        values |= {f"queue.{tier}": writer.queued_bytes for tier, writer in statistics.writers.items()}
        return Sample(time.monotonic(), values)

    def charts(self, samples: Sequence[Sample]) -> list[Chart]:
        parts = {f"hit.{tier}": tier for tier in self._tiers}
        if samples[-1].values["local"]:
            parts = {"local": _LOCAL, **parts}
        found = shares(samples, list(parts), "prompt", window=_WINDOW)
        queues = [name for name in samples[-1].values if name.startswith("queue.")]
        sources = [Series(label, found[name]) for name, label in parts.items()]
        moved = [Series(name, rates(samples, name)) for name in ("loaded", "stored")]
        pending = [Series(name.removeprefix("queue."), gauge_values(samples, name)) for name in queues]
        leased = [Series("in use", gauge_values(samples, "leased"))]
        note = f"over {_WINDOW} s; the rest was computed"
        charts = [
            Chart("Where prompt tokens came from", "share", sources, stacked=True, note=note),
            Chart("Bytes moved", "bytes/s", moved, note="between tiers and device"),
            Chart("Pending writes", "bytes", pending, note="queues of the slower tiers"),
            Chart("Host memory", "bytes", leased, note="slabs of the arena that are not free"),
        ]
        return [chart for chart in charts if chart.series]

    def status(self) -> dict[str, Any]:
        statistics, namespace, metrics = self._statistics(), self._namespace, self._metrics
        rank = f"{namespace.rank} of {namespace.world_size}"
        facts = [("rank", rank), ("chunk", f"{self._chunk_size} tokens")]
        return {
            **page_head("engine", namespace.model, facts, self._opened),
            "totals": {
                "prompt_tokens": metrics.prompt_tokens,
                "local_tokens": metrics.local_tokens,
                "hit_tokens": sum(metrics.values("retrieve_hit_tokens_total").values()),
                "stored_tokens": metrics.stored_tokens.value,
                "loaded_bytes": metrics.retrieved_bytes.value,
                "load_seconds": round(metrics.retrieve_seconds.sum, 6),
                "stored_bytes": metrics.stored_bytes.value,
                "store_copy_seconds": round(metrics.copy_seconds.sum, 6),
                "retrieves": _by_cause(metrics, "retrieves_total"),
                "stores": metrics.stores.value,
                "dropped_chunks": _by_cause(metrics, "dropped_chunks_total"),
                "decided": dict(metrics.decided),
            },
            "memory": {
                "bytes": statistics.arena.num_slabs * statistics.arena.slab_bytes,
                "leased_bytes": statistics.arena.leased_slabs * statistics.arena.slab_bytes,
                "peak_leased_bytes": statistics.arena.peak_leased_slabs * statistics.arena.slab_bytes,
                "waiting": statistics.arena.waiting,
                "timeouts": statistics.arena.timeouts,
            },
            "work": {
                "running": statistics.running,
                "pinned_chunks": statistics.pinned_chunks,
                "late_calls": statistics.late_calls,
            },
            "tiers": [_tier(tier, statistics, metrics) for tier in statistics.tiers],
            "recent": self.recent.as_list(),
        }

    def metrics(self) -> bytes:
        return exposition(self._metrics.read().families())


def _tier(name: str, statistics: EngineStatistics, metrics: EngineMetrics) -> dict[str, Any]:
    tier, writer, layers = statistics.tiers[name], statistics.writers.get(name), statistics.layers[name]
    counts = metrics.tier(name)
    return {
        "id": name,
        "chunks": tier.chunks,
        "bytes": tier.bytes,
        "max_bytes": tier.max_bytes,
        "evictions": tier.evictions,
        "hit_tokens": counts.hit_tokens.value,
        "hit_chunks": counts.hit_chunks.value,
        "stored_chunks": counts.stored_chunks.value,
        "promoted_chunks": counts.promoted_chunks.value,
        "dropped": _by_cause(metrics, "tier_dropped_chunks_total", name),
        "errors": _by_cause(metrics, "tier_errors_total", name),
        "corrupt": tier.corrupt + sum(_by_cause(metrics, "corrupt_records_total", name).values()),
        "in_place": name in statistics.in_arena,
        "queue": writer
        and {
            "chunks": writer.queued_chunks,
            "bytes": writer.queued_bytes,
            "max_bytes": writer.max_bytes,
            "refused": writer.refused,
        },
        "breaker": _breaker(layers),
        "calls": {
            verb: {
                "calls": call.calls,
                "in_flight": call.in_flight,
                "bytes": call.bytes,
                "seconds": round(call.seconds, 6),
                "errors": sum(call.errors.values()),
            }
            for verb, call in counts.by_verb.items()
        },
    }


def _by_cause(metrics: EngineMetrics, name: str, *tier: str) -> dict[str, float]:
    """Counts other than 0, by the first label after those in `tier`."""
    counts = metrics.values(name).items()
    return {labels[len(tier)]: n for labels, n in counts if n and labels[: len(tier)] == tier}


def _breaker(layers: Mapping[str, LayerStatistics]) -> dict[str, str] | None:
    """State of each circuit; None without a breaker."""
    for layer in layers.values():
        if isinstance(layer, BreakerStatistics):
            circuits = {"lookup": layer.lookup, "read": layer.read, "write": layer.write}
            return {name: str(circuit.state) for name, circuit in circuits.items()}
    return None
