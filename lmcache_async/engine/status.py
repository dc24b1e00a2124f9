"""The status page of an engine: its data source and its server."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from lmcache_async.config import EngineConfig, HTTPConfig
from lmcache_async.engine.metrics import EngineStatistics, engine_families
from lmcache_async.hashing import Namespace
from lmcache_async.observability.families import exposition
from lmcache_async.observability.totals import Totals
from lmcache_async.tiers.layers.base import LayerStatistics
from lmcache_async.tiers.layers.breaker import BreakerStatistics
from lmcache_async.tiers.layers.metrics import MetricsStatistics
from lmcache_async.web.opening import status_server
from lmcache_async.web.recent import RecentRequests
from lmcache_async.web.source import Chart, Sample, Series, gauge_values, package_version, rates, shares

_WINDOW = 10
"""Samples over which a share is averaged, because a request may be planned in one and loaded in another."""
_LOCAL = "vLLM itself"


@contextlib.asynccontextmanager
async def status_page(
    source: EngineSource, config: HTTPConfig, namespace: Namespace, *, replica: int = 0
) -> AsyncIterator[str | None]:
    """Serve the status page during the block, if `config.listen` is set, and give its URL.

    Raises:
        ConfigError: The configured address or file cannot be used.
        MissingDependencyError: aiohttp is not installed.
    """
    if config.listen is None:
        yield None
        return
    number = replica * namespace.world_size + namespace.rank
    async with status_server(source, config, rank=number) as server:
        yield server.url


class EngineSource:
    """Data of an engine for the status page, `lmcache-async top` and Prometheus.

    Args:
        config: Configuration of the engine.
        namespace: Namespace of the engine.
        totals: The totals of the engine.
        recent: The recent requests of the engine.
        statistics: Takes a snapshot of the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        namespace: Namespace,
        totals: Totals,
        recent: RecentRequests,
        statistics: Callable[[], EngineStatistics],
    ) -> None:
        self._chunk_size = config.chunk_size
        self._tiers = [tier.id for tier in config.tiers]
        self._namespace = namespace
        self._totals = totals
        self._recent = recent
        self._statistics = statistics
        self._opened = time.time()

    def sample(self) -> Sample:
        told, totals = self._statistics(), self._totals
        counts: dict[str, float] = {
            "prompt": self._recent.prompt_tokens,
            "local": self._recent.local_tokens,
            "loaded": totals.retrieved_bytes,
            "stored": totals.stored_bytes,
        }
        counts |= {f"hit.{tier}": totals.hit_tokens[tier] for tier in self._tiers}
        gauges: dict[str, float] = {"leased": told.arena.leased_slabs * told.arena.slab_bytes}
        gauges |= {f"queue.{tier}": writer.queued_bytes for tier, writer in told.writers.items()}
        return Sample(time.monotonic(), counts, gauges)

    def charts(self, samples: Sequence[Sample]) -> list[Chart]:
        parts = {f"hit.{tier}": tier for tier in self._tiers}
        if samples[-1].counts["local"]:
            parts = {"local": _LOCAL, **parts}
        found = shares(samples, list(parts), "prompt", window=_WINDOW)
        queues = [name for name in samples[-1].gauges if name.startswith("queue.")]
        charts = [
            Chart(
                "Where prompt tokens came from",
                "share",
                [Series(label, found[name]) for name, label in parts.items()],
                stacked=True,
                note=f"over {_WINDOW} s; the rest was computed",
            ),
            Chart(
                "Bytes moved",
                "bytes/s",
                [Series("loaded", rates(samples, "loaded")), Series("stored", rates(samples, "stored"))],
                note="between tiers and device",
            ),
        ]
        if queues:
            charts.append(
                Chart(
                    "Waiting to be written",
                    "bytes",
                    [Series(name.removeprefix("queue."), gauge_values(samples, name)) for name in queues],
                    note="before the slower tiers",
                )
            )
        leased = Series("in use", gauge_values(samples, "leased"))
        charts.append(Chart("Host memory", "bytes", [leased], note="slabs of the arena that are not free"))
        return charts

    def status(self) -> dict[str, Any]:
        told, namespace, totals = self._statistics(), self._namespace, self._totals
        return {
            "kind": "engine",
            "title": namespace.model,
            "facts": [
                ["rank", f"{namespace.rank} of {namespace.world_size}"],
                ["chunk", f"{self._chunk_size} tokens"],
                ["host", socket.gethostname()],
                ["process", str(os.getpid())],
                ["lmcache-async", package_version()],
            ],
            "time": round(time.time(), 3),
            "uptime_s": round(time.time() - self._opened, 3),
            "totals": {
                "prompt_tokens": self._recent.prompt_tokens,
                "local_tokens": self._recent.local_tokens,
                "hit_tokens": sum(totals.hit_tokens.values()),
                "stored_tokens": totals.stored_tokens,
                "loaded_bytes": totals.retrieved_bytes,
                "load_seconds": round(totals.retrieve_seconds.seconds, 6),
                "stored_bytes": totals.stored_bytes,
                "store_copy_seconds": round(totals.copy_seconds.seconds, 6),
                "retrieves": dict(totals.retrieves),
                "stores": totals.stores,
                "dropped_chunks": dict(totals.dropped_chunks),
                "decided": dict(self._recent.decided),
            },
            "memory": {
                "bytes": told.arena.num_slabs * told.arena.slab_bytes,
                "leased_bytes": told.arena.leased_slabs * told.arena.slab_bytes,
                "peak_leased_bytes": told.arena.peak_leased_slabs * told.arena.slab_bytes,
                "waiting": told.arena.waiting,
                "timeouts": told.arena.timeouts,
            },
            "work": {
                "running": told.running,
                "pinned_chunks": told.pinned_chunks,
                "late_calls": told.late_calls,
            },
            "tiers": [
                {
                    **_tier(tier, told),
                    "hit_tokens": totals.hit_tokens[tier],
                    "in_place": tier in told.in_arena,
                }
                for tier in told.tiers
            ],
            "recent": self._recent.as_list(),
        }

    def metrics(self) -> bytes:
        return exposition(engine_families(self._statistics(), self._totals))


def _tier(name: str, told: EngineStatistics) -> dict[str, Any]:
    tier, writer, layers = told.tiers[name], told.writers.get(name), told.layers[name]
    counts = told.counts
    return {
        "id": name,
        "chunks": tier.chunks,
        "bytes": tier.bytes,
        "max_bytes": tier.max_bytes,
        "evictions": tier.evictions,
        "hit_chunks": counts.get(f"{name}.hits", 0),
        "stored_chunks": counts.get(f"{name}.stored", 0),
        "promoted_chunks": counts.get(f"{name}.promoted", 0),
        "dropped": _by_cause(counts, f"{name}.dropped."),
        "errors": _by_cause(counts, f"{name}.errors."),
        "corrupt": tier.corrupt + sum(_by_cause(counts, f"{name}.corrupt.").values()),
        "queue": writer
        and {
            "chunks": writer.queued_chunks,
            "bytes": writer.queued_bytes,
            "max_bytes": writer.max_bytes,
            "refused": writer.refused,
        },
        "breaker": _breaker(layers),
        "calls": _calls(layers),
    }


def _by_cause(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


def _breaker(layers: Mapping[str, LayerStatistics]) -> dict[str, str] | None:
    """State of each circuit; None without a breaker."""
    for layer in layers.values():
        if isinstance(layer, BreakerStatistics):
            circuits = {"lookup": layer.lookup, "read": layer.read, "write": layer.write}
            return {name: str(circuit.state) for name, circuit in circuits.items()}
    return None


def _calls(layers: Mapping[str, LayerStatistics]) -> dict[str, dict[str, Any]]:
    """Calls by verb, from the outermost `metrics` layer."""
    for layer in layers.values():
        if isinstance(layer, MetricsStatistics):
            return {
                verb: {
                    "calls": told.calls,
                    "in_flight": told.in_flight,
                    "bytes": told.bytes,
                    "seconds": round(told.seconds, 6),
                    "errors": sum(told.errors.values()),
                }
                for verb, told in layer.verbs.items()
            }
    return {}
