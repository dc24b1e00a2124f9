"""Source of the daemon's status page and metrics."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmcache_async.daemon.pool import Pool, PoolStatistics
from lmcache_async.metrics.charts import Chart, Sample, Series, gauge_values, page_head
from lmcache_async.metrics.samples import Samples, exposition

MAX_TENANTS = 8
"""Tenants in samples and charts, the largest ones. The table lists all of them."""


class DaemonSource:
    """Samples, charts and status of a daemon for the status page, `top` and Prometheus.

    Args:
        pool: The daemon's pool.
        path: Path of the daemon's socket.
        clients: Returns the number of connected clients.
    """

    def __init__(self, pool: Pool, path: Path, clients: Callable[[], int]) -> None:
        self._pool = pool
        self._path = path
        self._clients = clients
        self._opened = time.time()

    def sample(self) -> Sample:
        pool = self._pool.statistics()
        largest = heapq.nlargest(MAX_TENANTS, pool.tenants.items(), key=lambda item: item[1].bytes)
        values: dict[str, float] = {f"tenant.{name}": tenant.bytes for name, tenant in largest}
        values["readers"] = sum(tenant.readers for tenant in pool.tenants.values())
        values["writers"] = sum(tenant.writers for tenant in pool.tenants.values())
        return Sample(time.monotonic(), values)

    def charts(self, samples: Sequence[Sample]) -> list[Chart]:
        held = {name: value for name, value in samples[-1].values.items() if name.startswith("tenant.")}
        largest = sorted(held, key=lambda name: (-held[name], name))
        return [
            Chart(
                "Memory by tenant",
                "bytes",
                [Series(name.removeprefix("tenant."), gauge_values(samples, name)) for name in largest],
                stacked=True,
                note="bytes of each tenant" if len(held) < MAX_TENANTS else "the largest tenants",
            ),
            Chart(
                "Leases",
                "count",
                [Series(name, gauge_values(samples, name)) for name in ("readers", "writers")],
                note="records that are being read or written",
            ),
        ]

    def status(self) -> dict[str, Any]:
        pool = self._pool.statistics()
        return {
            **page_head("daemon", "host pool", [("socket", str(self._path))], self._opened),
            "pool": {
                "bytes": sum(tenant.bytes for tenant in pool.tenants.values()),
                "max_bytes": pool.max_bytes,
                "unused_bytes": pool.unused_bytes,
                "segments": pool.segments,
                "clients": self._clients(),
            },
            "tenants": [{"id": name, **asdict(tenant)} for name, tenant in sorted(pool.tenants.items())],
        }

    def metrics(self) -> bytes:
        return exposition(pool_samples(self._pool.statistics()).families())


def pool_samples(pool: PoolStatistics) -> Samples:
    """Return the values of the daemon's series."""
    out = Samples()
    out.add("pool_max_bytes", pool.max_bytes)
    out.add("pool_unused_bytes", pool.unused_bytes)
    out.add("pool_segments", pool.segments)
    for name, tenant in pool.tenants.items():
        for field, value in asdict(tenant).items():
            out.add(f"pool_tenant_{'evictions_total' if field == 'evictions' else field}", value, name)
    return out
