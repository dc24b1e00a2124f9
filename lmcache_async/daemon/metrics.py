"""Metrics of the daemon's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.observability.families import Family, Filling

if TYPE_CHECKING:
    from lmcache_async.daemon.pool import PoolStatistics

POOL = "lmcache_async_pool_"

SERIES = (
    Family(f"{POOL}max_bytes", "gauge", "The pool's memory."),
    Family(f"{POOL}unused_bytes", "gauge", "Of the pool, what is cut for no size of record yet."),
    Family(f"{POOL}segments", "gauge", "Pieces of memory that are cut for one size of record each."),
    Family(f"{POOL}tenant_chunks", "gauge", "Records that readers find.", ("tenant",)),
    Family(f"{POOL}tenant_record_bytes", "gauge", "Those, in whole pages.", ("tenant",)),
    Family(
        f"{POOL}tenant_bytes",
        "gauge",
        "The same with reservations and removed records that are still leased.",
        ("tenant",),
    ),
    Family(f"{POOL}tenant_max_bytes", "gauge", "The most that a tenant may hold.", ("tenant",)),
    Family(f"{POOL}tenant_readers", "gauge", "Leases of readers.", ("tenant",)),
    Family(f"{POOL}tenant_writers", "gauge", "Reservations that were not committed yet.", ("tenant",)),
    Family(f"{POOL}tenant_evictions_total", "counter", "Records given up for room.", ("tenant",)),
)


def daemon_families(pool: PoolStatistics) -> list[Family]:
    """Return the metric families of a daemon."""
    out = Filling(SERIES)
    out.put(f"{POOL}max_bytes", pool.max_bytes)
    out.put(f"{POOL}unused_bytes", pool.unused_bytes)
    out.put(f"{POOL}segments", pool.segments)
    for name, tenant in pool.tenants.items():
        out.put(f"{POOL}tenant_chunks", tenant.chunks, name)
        out.put(f"{POOL}tenant_record_bytes", tenant.record_bytes, name)
        out.put(f"{POOL}tenant_bytes", tenant.bytes, name)
        out.put(f"{POOL}tenant_max_bytes", tenant.max_bytes, name)
        out.put(f"{POOL}tenant_readers", tenant.readers, name)
        out.put(f"{POOL}tenant_writers", tenant.writers, name)
        out.put(f"{POOL}tenant_evictions_total", tenant.evictions, name)
    return out.families()
