"""Records of all tenants in one piece of memory: leases, reservations, eviction and quotas. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.daemon.room import SEGMENT_BYTES, Place, Room, pages
from lmcache_async.daemon.tenants import PoolStatistics, Quota, Tenant, TenantStatistics
from lmcache_async.daemon.victims import Victims

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_async.types import ChunkKey

MAX_TENANTS = 1024
"""From here on tenants that hold nothing are forgotten before a new one is known."""


@dataclass(eq=False, slots=True)
class Slot:
    """One lease of a record's memory, to be ended exactly once: by `release`, a writer's also by `commit`.

    Attributes:
        offset: Of the first byte in the pool's memory, a multiple of 4096.
        nbytes: The record's length.
        view: Those bytes; the bytes after them, to the end of the last 4096, are the slot's too.
        writes: Whether it is a writer's.
    """

    offset: int
    nbytes: int
    view: memoryview
    writes: bool
    _place: Place = field(repr=False)
    _ended: bool = field(default=False, repr=False)


class Pool:
    """Keeps records by tenant and key in `memory`. Used on one thread; nothing waits.

    A record is found from its commit on and never changes; what somebody has a lease of is neither
    given up nor used again. The least recently used record of the size that is wanted goes first, a
    suffix before its prefix; where records of other sizes are the older ones, a segment of those is
    emptied and cut anew.

    Args:
        memory: All of it, writable.
        quotas: By tenant.
        other_quota: Of each tenant without one of its own.
        segment_bytes: See `Room`.
    """

    def __init__(
        self,
        memory: memoryview,
        *,
        quotas: Mapping[str, Quota] | None = None,
        other_quota: Quota | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._memory = memory
        self._room = Room(memory.nbytes, segment_bytes)
        self._quotas = dict(quotas or {})
        self._other_quota = other_quota or Quota()
        self._tenants: dict[str, Tenant] = {}
        self._victims = Victims(self._room, self._tenants)
        self._clock = 0

    def contains(self, tenant: str, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether each is there now. Asked for together, in prompt order, they count as used."""
        owner = self._tenant(tenant)
        owner.policy.touch(keys, gapless=False)
        self._clock += 1
        there = [owner.records.get(key) for key in keys]
        for place in there:
            if place is not None:
                place.used = self._clock
        return [place is not None for place in there]

    def lease(self, tenant: str, key: ChunkKey) -> Slot | None:
        """A reader's lease, which counts as a use; None on a miss.

        Several of one prompt are best leased from the last to the first.
        """
        owner = self._tenant(tenant)
        place = owner.records.get(key)
        if place is None:
            return None
        owner.policy.touch([key])
        self._clock += 1
        place.used = self._clock
        owner.readers += 1
        return self._slot(place, writes=False)

    def reserve(self, tenant: str, nbytes: int, *, key: ChunkKey | None = None) -> Slot | None:
        """Memory for a record, seen by nobody until it is committed; None when none is to be had.

        Args:
            tenant: Whose quota it counts against.
            nbytes: Its length, at least 1.
            key: What it is meant for, where that is known: what the chunk continues is not given up for it.

        Raises:
            ValueError: `nbytes` is less than 1.
        """
        if nbytes < 1:
            raise ValueError(f"a record has at least 1 byte, not {nbytes}")
        owner = self._tenant(tenant)
        waits = key is not None and key not in owner.policy
        if key is not None and waits:
            owner.policy.add(key, 1)
        place = self._take(owner, nbytes, key)
        if place is None:
            if key is not None and waits:
                _forget(owner, key)
            return None
        self._clock += 1
        place.used = self._clock
        place.key = key
        owner.held_bytes += place.held_bytes
        owner.writers += 1
        return self._slot(place, writes=True)

    def commit(self, tenant: str, key: ChunkKey, slot: Slot) -> None:
        """The record is found from now on; the writer's lease has ended.

        Where the key is there already, that record stays and this one is given up: the content is equal.

        Raises:
            ValueError: It was reserved for another tenant, or is no writer's.
            RuntimeError: The lease has ended already.
        """
        place = slot._place
        if not slot.writes or place.tenant != tenant:
            raise ValueError(f"slot at {slot.offset} is no reservation of tenant {tenant}")
        owner = self._tenants[tenant]
        self._end(slot)
        owner.writers -= 1
        if place.key != key:
            self._forget_intent(owner, place)
        if key in owner.records:
            self._free(place)
            return
        place.key, place.committed = key, True
        owner.records[key] = place
        owner.record_bytes += place.held_bytes
        if key not in owner.policy:
            owner.policy.add(key, 1)
        owner.policy.touch([key])

    def release(self, slot: Slot) -> None:
        """End a reader's lease, or a writer's without a commit.

        Raises:
            RuntimeError: It has ended already.
        """
        self._end(slot)
        place = slot._place
        owner = self._tenants[place.tenant]
        if slot.writes:
            owner.writers -= 1
            self._forget_intent(owner, place)
        else:
            owner.readers -= 1
        if not place.committed and not place.leases:
            self._free(place)

    def remove(self, tenant: str, key: ChunkKey) -> bool:
        """Readers find it no more; whether it was there. Its memory is free with its last lease."""
        owner = self._tenant(tenant)
        place = owner.records.get(key)
        if place is None:
            return False
        self._drop(place)
        return True

    def keys(self, tenant: str) -> list[ChunkKey]:
        """Of all records, in no order."""
        return list(self._tenant(tenant).records)

    def clear(self, tenant: str) -> int:
        """Remove all of the tenant's; how many there were."""
        places = list(self._tenant(tenant).records.values())
        for place in places:
            self._drop(place)
        return len(places)

    def tenant_statistics(self, tenant: str) -> TenantStatistics:
        """What that tenant holds, in O(1)."""
        return self._tenant(tenant).statistics()

    def statistics(self) -> PoolStatistics:
        for name in self._quotas:
            self._tenant(name)
        return PoolStatistics(
            max_bytes=self._room.nbytes,
            unused_bytes=self._room.gap_bytes,
            segments=self._room.segments,
            tenants={
                name: tenant.statistics()
                for name, tenant in self._tenants.items()
                if name in self._quotas or not tenant.idle
            },
        )

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                for idle in [known for known in self._tenants.values() if not known.held_bytes]:
                    del self._tenants[idle.name]
            quota = self._quotas.get(name, self._other_quota)
            most = self._room.nbytes if quota.max_bytes is None else min(quota.max_bytes, self._room.nbytes)
            tenant = self._tenants[name] = Tenant(name, most, quota.reserved_bytes)
        return tenant

    def _slot(self, place: Place, *, writes: bool) -> Slot:
        place.leases += 1
        view = self._memory[place.offset : place.offset + place.nbytes]
        return Slot(place.offset, place.nbytes, view, writes, place)

    def _end(self, slot: Slot) -> None:
        if slot._ended:
            raise RuntimeError(f"the lease of the slot at {slot.offset} was given back twice")
        slot._ended = True
        slot._place.leases -= 1

    def _forget_intent(self, owner: Tenant, place: Place) -> None:
        """The reservation will not become a record of the key that it was meant for."""
        if place.key is not None and place.key not in owner.records:
            _forget(owner, place.key)

    def _take(self, owner: Tenant, nbytes: int, key: ChunkKey | None) -> Place | None:
        wanted = pages(nbytes)
        if wanted > owner.max_bytes:
            return None
        while owner.held_bytes + wanted > owner.max_bytes:
            victim = self._victims.among_own(owner)
            if victim is None:
                return None
            self._evict(victim)
        while (place := self._room.take(owner.name, nbytes)) is None:
            victims = self._victims.choose(owner, nbytes, key)
            if not victims:
                return None
            for victim in victims:
                self._evict(victim)
        return place

    def _evict(self, place: Place) -> None:
        self._tenants[place.tenant].evictions += 1
        self._drop(place)

    def _drop(self, place: Place) -> None:
        owner = self._tenants[place.tenant]
        assert place.key is not None  # committed
        del owner.records[place.key]
        owner.record_bytes -= place.held_bytes
        owner.policy.discard(place.key)
        place.committed = False
        if not place.leases:
            self._free(place)

    def _free(self, place: Place) -> None:
        self._tenants[place.tenant].held_bytes -= place.held_bytes
        self._room.give(place)


def _forget(owner: Tenant, key: ChunkKey) -> None:
    """The chunk will not be held, but its place in its prompt is still known: others continue it."""
    before = owner.policy.before(key)
    if owner.policy.discard(key) and before is not None:
        owner.policy.touch([before, key])
