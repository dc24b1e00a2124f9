"""What the daemon's pool holds and its peers do, as families of metrics; the table at the top says what each is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.observability.families import Family, Filling

if TYPE_CHECKING:
    from lmcache_async.daemon.peers import PeerStatistics
    from lmcache_async.daemon.tenants import PoolStatistics

POOL = "lmcache_async_pool_"
PEER = "lmcache_async_peer_"

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
    Family(f"{PEER}connections", "gauge", "Connections of peers that are served now."),
    Family(f"{PEER}max_connections", "gauge", "The bound of these."),
    Family(f"{PEER}sent_records_total", "counter", "Whole records that peers read."),
    Family(f"{PEER}sent_bytes_total", "counter", "Their bytes."),
    Family(f"{PEER}misses_total", "counter", "Reads of what is not there."),
    Family(f"{PEER}received_records_total", "counter", "Whole records that peers wrote and that are kept."),
    Family(f"{PEER}received_bytes_total", "counter", "Their bytes."),
    Family(f"{PEER}refused_total", "counter", "Connections that were one too many."),
    Family(f"{PEER}failed_logins_total", "counter", "Wrong tokens."),
    Family(f"{PEER}ended_total", "counter", "Connections that the daemon ended, by cause.", ("cause",)),
)


def daemon_families(pool: PoolStatistics, peers: PeerStatistics | None = None) -> list[Family]:
    """All series of a daemon; without `peers` where it serves none."""
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
    if peers is not None:
        _peers(out, peers)
    return out.families()


def _peers(out: Filling, peers: PeerStatistics) -> None:
    out.put(f"{PEER}connections", peers.connections)
    out.put(f"{PEER}max_connections", peers.max_connections)
    counts = peers.counts
    for name in ("sent_records", "sent_bytes", "misses", "received_records", "received_bytes", "refused"):
        out.put(f"{PEER}{name}_total", getattr(counts, name))
    out.put(f"{PEER}failed_logins_total", counts.failed_logins)
    for cause, count in counts.ended.items():
        out.put(f"{PEER}ended_total", count, cause)
