"""Whose records the pool holds, how much each may hold, and what each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.tiers.eviction import LRUPolicy

if TYPE_CHECKING:
    from lmcache_async.daemon.room import Place
    from lmcache_async.types import ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a tenant may hold.

    Attributes:
        max_bytes: The most, with what it reserved; None is all of the pool.
        reserved_bytes: Others never evict below this.
    """

    max_bytes: int | None = None
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """What a tenant holds.

    Attributes:
        chunks: Records that readers find.
        record_bytes: Those, in whole pages.
        bytes: The same with reservations and removed records that are still leased.
        max_bytes: The most that may become.
        evictions: Records given up for room since the pool was made.
        readers: Readers' leases.
        writers: Reservations that were not committed yet.
    """

    chunks: int
    record_bytes: int
    bytes: int
    max_bytes: int
    evictions: int
    readers: int
    writers: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool holds.

    Attributes:
        max_bytes: The whole pool.
        unused_bytes: Bytes that are cut for no size of record yet.
        segments: Pieces of memory that are cut for one size each.
        tenants: By name; those that hold nothing and have no quota of their own are left out.
    """

    max_bytes: int
    unused_bytes: int
    segments: int
    tenants: Mapping[str, TenantStatistics]


@dataclass(eq=False, slots=True)
class Tenant:
    """A tenant's records, and the order in which they go."""

    name: str
    max_bytes: int
    reserved_bytes: int
    held_bytes: int = 0
    record_bytes: int = 0
    evictions: int = 0
    readers: int = 0
    writers: int = 0
    records: dict[ChunkKey, Place] = field(default_factory=dict)
    # Also keys of reservations, so that room for a chunk is not made by giving up what it continues.
    policy: LRUPolicy = field(default_factory=LRUPolicy)

    @property
    def idle(self) -> bool:
        return not self.held_bytes and not self.evictions

    def statistics(self) -> TenantStatistics:
        return TenantStatistics(
            chunks=len(self.records),
            record_bytes=self.record_bytes,
            bytes=self.held_bytes,
            max_bytes=self.max_bytes,
            evictions=self.evictions,
            readers=self.readers,
            writers=self.writers,
        )
