"""Records of all tenants in one piece of memory: leases, reservations, eviction and quotas. No I/O."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lmcache_async.daemon.allocator import RangeAllocator
from lmcache_async.daemon.config import TenantOptions
from lmcache_async.memory.buffer import pages
from lmcache_async.tiers.eviction import LRUPolicy
from lmcache_async.types import ChunkKey

MAX_TENANTS = 1024
"""If there are this many tenants, those without memory are removed before another one is added."""
MAX_TRIES = 64
"""Maximum number of records whose neighbours are examined for one reservation. If none suffices, it is refused."""


@dataclass(slots=True)
class TenantStatistics:
    """Statistics of a tenant, as the series `pool_tenant_*` describe them."""

    chunks: int = 0
    record_bytes: int = 0  # of `chunks`, in whole pages
    bytes: int = 0  # of records, reservations, and removed records that are still leased
    max_bytes: int = 0
    evictions: int = 0
    readers: int = 0
    writers: int = 0  # reservations that are not committed yet


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Statistics of a pool, as the series `pool_*` describe them.

    Tenants without memory, evictions and a quota of their own are left out.
    """

    max_bytes: int
    unused_bytes: int
    segments: int  # contiguous ranges of unused bytes
    tenants: Mapping[str, TenantStatistics]


@dataclass(eq=False, slots=True)
class Tenant:
    """A tenant's records and their eviction order."""

    name: str
    reserved_bytes: int
    figures: TenantStatistics
    records: dict[ChunkKey, Block] = field(default_factory=dict)
    sizes: Counter[int] = field(default_factory=Counter)  # records by their bytes in whole pages
    # Includes keys of reservations, so that a chunk does not evict the chunks that it continues.
    policy: LRUPolicy = field(default_factory=LRUPolicy)

    def count(self, block: Block, sign: int) -> None:
        """Count a committed record, or with -1 its removal."""
        self.figures.chunks += sign
        self.figures.record_bytes += sign * block.held_bytes
        self.sizes[block.held_bytes] += sign
        if not self.sizes[block.held_bytes]:
            del self.sizes[block.held_bytes]


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one record, and its leases.

    A block begins as a reservation with one lease, the writer's. Readers find it from its commit until its
    removal. It occupies whole pages.
    """

    owner: Tenant
    key: ChunkKey
    offset: int
    nbytes: int
    view: memoryview = field(repr=False)
    leases: int = 1
    reserved: bool = True
    committed: bool = False
    used: int = 0  # last use, as a count of the uses in the pool

    @property
    def held_bytes(self) -> int:
        """Bytes that count against quotas: whole pages."""
        return pages(self.nbytes)

    @property
    def end(self) -> int:
        return self.offset + self.held_bytes


class Pool:
    """Records by tenant and key in `memory`. Used on one thread; no call waits.

    A record is visible to readers from its commit on, and never changes. Memory with a lease is neither
    evicted nor reused. The least recently used record is evicted first, a suffix before its prefix. If it is
    smaller than the new record, records beside it in memory are evicted with it.

    Args:
        memory: The pool's memory, writable.
        quotas: By tenant.
        other_quota: Quota of each tenant that `quotas` does not name.
    """

    def __init__(
        self,
        memory: memoryview,
        *,
        quotas: Mapping[str, TenantOptions] | None = None,
        other_quota: TenantOptions | None = None,
    ) -> None:
        self._memory = memory
        self._allocator = RangeAllocator(memory.nbytes)
        self._by_offset: dict[int, Block] = {}
        self._by_end: dict[int, Block] = {}
        self._quotas = dict(quotas or {})
        self._other_quota = other_quota or TenantOptions()
        self._tenants: dict[str, Tenant] = {}
        self._clock = 0

    def contains(self, tenant: str, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return whether each key has a record. The keys, in prompt order, count as used together."""
        owner = self._tenant(tenant)
        owner.policy.touch(keys, gapless=False)
        self._clock += 1
        there = [owner.records.get(key) for key in keys]
        for block in there:
            if block is not None:
                block.used = self._clock
        return [block is not None for block in there]

    def lease(self, tenant: str, key: ChunkKey) -> Block | None:
        """Lease a record for a reader, which counts as a use; None on a miss. The lease ends with `release`.

        Lease the records of one prompt from the last to the first, so that prefixes are the most recently
        used.
        """
        owner = self._tenant(tenant)
        block = owner.records.get(key)
        if block is None:
            return None
        owner.policy.touch([key])
        self._clock += 1
        block.used = self._clock
        block.leases += 1
        owner.figures.readers += 1
        return block

    def reserve(self, tenant: str, key: ChunkKey, nbytes: int) -> Block | None:
        """Reserve memory for a record; None if the pool is full. Ends with `commit` or `release`.

        The chunks before this chunk in its prompt are not evicted for it.
        """
        if nbytes < 1:
            raise ValueError(f"a record has at least 1 byte, not {nbytes}")
        owner = self._tenant(tenant)
        is_new = key not in owner.policy
        if is_new:
            owner.policy.add(key, 1)
        offset = self._take(owner, key, pages(nbytes))
        if offset is None:
            if is_new:
                owner.policy.discard(key)
            return None
        self._clock += 1
        block = Block(owner, key, offset, nbytes, self._memory[offset : offset + nbytes], used=self._clock)
        self._by_offset[block.offset] = self._by_end[block.end] = block
        owner.figures.bytes += block.held_bytes
        owner.figures.writers += 1
        return block

    def commit(self, block: Block) -> None:
        """Make a reserved record visible to readers and end the writer's lease.

        If the key already has a record, that one stays and this one is dropped: their contents are equal.
        """
        if not block.reserved:
            raise ValueError(f"the block at {block.offset} is not reserved")
        owner = block.owner
        block.reserved, block.leases = False, 0
        owner.figures.writers -= 1
        if block.key in owner.records:
            self._free(block)
            return
        block.committed = True
        owner.records[block.key] = block
        owner.count(block, 1)
        if block.key not in owner.policy:
            owner.policy.add(block.key, 1)
        owner.policy.touch([block.key])

    def release(self, block: Block) -> None:
        """End a reader's lease, or a reservation without a commit."""
        if not block.leases:
            raise RuntimeError(f"a lease of the block at {block.offset} was released twice")
        owner = block.owner
        block.leases -= 1
        if block.reserved:
            block.reserved = False
            owner.figures.writers -= 1
            if block.key not in owner.records:
                owner.policy.discard(block.key)
        else:
            owner.figures.readers -= 1
        if not block.committed and not block.leases:
            self._free(block)

    def remove(self, tenant: str, key: ChunkKey) -> bool:
        """Remove a record. Return whether it existed. Its memory is freed with its last lease."""
        owner = self._tenant(tenant)
        block = owner.records.get(key)
        if block is None:
            return False
        self._drop(block)
        return True

    def keys(self, tenant: str) -> list[ChunkKey]:
        """Return the keys of all records of the tenant, in no particular order."""
        return list(self._tenant(tenant).records)

    def clear(self, tenant: str) -> int:
        """Remove all records of the tenant. Return their number."""
        blocks = list(self._tenant(tenant).records.values())
        for block in blocks:
            self._drop(block)
        return len(blocks)

    def tenant_statistics(self, tenant: str) -> TenantStatistics:
        """Return the current statistics of a tenant, in O(1)."""
        return self._tenant(tenant).figures

    def statistics(self) -> PoolStatistics:
        for name in self._quotas:
            self._tenant(name)
        return PoolStatistics(
            max_bytes=self._allocator.nbytes,
            unused_bytes=self._allocator.free_bytes,
            segments=len(self._allocator),
            tenants={
                name: replace(tenant.figures)
                for name, tenant in self._tenants.items()
                if name in self._quotas or tenant.figures.bytes or tenant.figures.evictions
            },
        )

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                for idle in [known for known in self._tenants.values() if not known.figures.bytes]:
                    del self._tenants[idle.name]
            quota = self._quotas.get(name, self._other_quota)
            nbytes = self._allocator.nbytes
            most = nbytes if quota.max_bytes is None else min(quota.max_bytes, nbytes)
            figures = TenantStatistics(max_bytes=most)
            tenant = self._tenants[name] = Tenant(name, quota.reserved_bytes, figures)
        return tenant

    def _take(self, owner: Tenant, key: ChunkKey, wanted: int) -> int | None:
        """Return the offset of `wanted` bytes, for which records are evicted if necessary; None if the pool is full."""
        if wanted > owner.figures.max_bytes:
            return None
        has_quota = owner.figures.max_bytes < self._allocator.nbytes
        while has_quota and owner.figures.bytes + wanted > owner.figures.max_bytes:
            oldest = owner.policy.oldest(_key_predicate(owner, _is_unused))
            if oldest is None:
                return None
            self._evict(owner.records[oldest])
        while (offset := self._allocator.take(wanted)) is None:
            victims = self._choose_victims(owner, wanted, key)
            if not victims:
                return None
            for victim in victims:
                self._evict(victim)
        return offset

    def _evict(self, block: Block) -> None:
        block.owner.figures.evictions += 1
        self._drop(block)

    def _drop(self, block: Block) -> None:
        owner = block.owner
        del owner.records[block.key]
        owner.count(block, -1)
        owner.policy.discard(block.key)
        block.committed = False
        if not block.leases:
            self._free(block)

    def _free(self, block: Block) -> None:
        block.owner.figures.bytes -= block.held_bytes
        del self._by_offset[block.offset], self._by_end[block.end]
        self._allocator.give(block.offset, block.held_bytes)

    def _choose_victims(self, owner: Tenant, wanted: int, key: ChunkKey) -> Sequence[Block]:
        """Return records to evict for `wanted` bytes: the least recently used one, and neighbours if necessary.

        Leased records, reserved bytes of other tenants and the chunks that the new chunk continues are never
        chosen.
        """
        ancestors = functools.cache(lambda: _ancestors(owner, key))
        tries = MAX_TRIES

        def evictable(block: Block) -> bool:
            nonlocal tries
            if not self._is_evictable_for(owner, block, {}):
                return False
            tries -= 1
            # A negative number of tries ends the search.
            return tries < 0 or bool(self._with_neighbours(owner, block, wanted, ancestors))

        oldest: list[Block] = []
        for tenant in self._tenants.values():
            spare_bytes = tenant.figures.bytes - tenant.reserved_bytes
            if tenant is not owner and spare_bytes < min(tenant.sizes, default=0):
                continue  # even its smallest record cannot be evicted, so no scan is needed
            found = tenant.policy.oldest(_key_predicate(tenant, evictable))
            if tries < 0:
                break
            if found is not None:
                oldest.append(tenant.records[found])
        if not oldest:
            return ()
        return self._with_neighbours(owner, min(oldest, key=lambda block: block.used), wanted, ancestors)

    def _with_neighbours(
        self, owner: Tenant, block: Block, wanted: int, ancestors: Callable[[], set[ChunkKey]]
    ) -> Sequence[Block]:
        """Return the record and the neighbours to evict to get `wanted` contiguous bytes; () if that is impossible.

        Of two neighbours, the less recently used one is chosen.
        """
        victims: list[Block] = []
        taken: Counter[str] = Counter()  # bytes of the victims by tenant
        start, end = block.offset, block.end
        while True:
            victims.append(block)
            taken[block.owner.name] += block.held_bytes
            start, end = self._allocator.unused_around(min(start, block.offset), max(end, block.end))
            if end - start >= wanted:
                return victims
            beside = [
                each
                for each in (self._by_end.get(start), self._by_offset.get(end))
                if each is not None
                and self._is_evictable_for(owner, each, taken)
                and not (each.owner is owner and each.key in ancestors())
            ]
            if not beside:
                return ()
            block = min(beside, key=lambda block: block.used)

    def _is_evictable_for(self, owner: Tenant, block: Block, taken: Mapping[str, int]) -> bool:
        """Return whether the record can be evicted for one of `owner`, if `taken` bytes of each tenant are evicted too."""
        if not _is_unused(block):
            return False
        other = block.owner
        left_bytes = other.figures.bytes - taken.get(other.name, 0) - block.held_bytes
        return other is owner or left_bytes >= other.reserved_bytes


def _is_unused(block: Block) -> bool:
    """Whether it is a committed record without leases."""
    return block.committed and not block.leases


def _key_predicate(tenant: Tenant, is_evictable: Callable[[Block], bool]) -> Callable[[ChunkKey], bool]:
    def evictable(key: ChunkKey) -> bool:
        block = tenant.records.get(key)  # None: reserved, and not committed yet
        return block is not None and is_evictable(block)

    return evictable


def _ancestors(tenant: Tenant, key: ChunkKey) -> set[ChunkKey]:
    """Return the keys of the chunks that the chunk continues."""
    found: set[ChunkKey] = set()
    before = tenant.policy.before(key)
    while before is not None:
        found.add(before)
        before = tenant.policy.before(before)
    return found
