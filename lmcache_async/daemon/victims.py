"""Which records go when the pool has no room: the choice alone, nothing is given up here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.daemon.room import pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lmcache_async.daemon.room import Place, Room, Segment
    from lmcache_async.daemon.tenants import Tenant
    from lmcache_async.types import ChunkKey

PAUSE = 64
"""Choices without a look at records of other sizes, after one that was in vain: it reads all of them."""


class Victims:
    """Chooses among unused records: the least recently used, suffixes first, no other's reserved share.

    What a chunk continues is never given up for it. Where records of other sizes are older than all that
    would make room by itself, a segment of those goes: all of it, so half of it has to be as old.
    """

    def __init__(self, room: Room, tenants: Mapping[str, Tenant]) -> None:
        self._room = room
        self._tenants = tenants
        self._pause = 0

    def among_own(self, owner: Tenant) -> Place | None:
        """Of the tenant's own, of any size."""
        key = owner.policy.oldest(_among(owner, _is_unused))
        return None if key is None else owner.records[key]

    def choose(self, owner: Tenant, nbytes: int, key: ChunkKey | None) -> list[Place]:
        """Of all, for a record of that length: one of its size, or all of some segments; none in vain."""
        has_size = self._room.has_size_for(nbytes)
        oldest = self._oldest(owner, lambda place: self._room.fits(place, nbytes)) if has_size else None
        one = [] if oldest is None else [oldest]
        if has_size and self._pause:
            self._pause -= 1
            return one
        if oldest is not None:
            any_size = self._oldest(owner, lambda _: True)
            if any_size is None or any_size.used >= oldest.used:
                return one
        return self._segments(owner, nbytes, key, oldest) or one

    def _segments(
        self, owner: Tenant, nbytes: int, key: ChunkKey | None, oldest: Place | None
    ) -> list[Place]:
        """All records of the segments to be emptied; none where these are worth more than `oldest`."""
        before = _ancestors(owner, key)

        def price(segment: Segment) -> int | None:
            places = segment.taken.values()
            if not self._may_take(owner, places) or any(id(place) in before for place in places):
                return None
            return sorted(place.used for place in places)[len(places) // 2]

        cost, segments = self._room.cheapest(pages(nbytes), price)
        victims = [place for segment in segments for place in segment.taken.values()]
        if not self._may_take(owner, victims) or (oldest is not None and cost >= oldest.used):
            victims = []
        if not victims:
            self._pause = PAUSE
        return victims

    def _oldest(self, owner: Tenant, wanted: Callable[[Place], bool]) -> Place | None:
        def may_go(place: Place) -> bool:
            return wanted(place) and self._may_take(owner, [place])

        found: list[Place] = []
        for tenant in self._tenants.values():
            key = tenant.policy.oldest(_among(tenant, may_go))
            if key is not None:
                found.append(tenant.records[key])
        return min(found, key=lambda place: place.used, default=None)

    def _may_take(self, owner: Tenant, places: Iterable[Place]) -> bool:
        """Whether these can go for a record of `owner`'s."""
        taken: dict[str, int] = {}
        for place in places:
            if not _is_unused(place):
                return False
            taken[place.tenant] = taken.get(place.tenant, 0) + place.held_bytes
        taken.pop(owner.name, None)
        return all(
            self._tenants[name].held_bytes - nbytes >= self._tenants[name].reserved_bytes
            for name, nbytes in taken.items()
        )


def _is_unused(place: Place) -> bool:
    """Whether it is a record that nobody has a lease of."""
    return place.committed and not place.leases


def _among(tenant: Tenant, may_go: Callable[[Place], bool]) -> Callable[[ChunkKey], bool]:
    def evictable(key: ChunkKey) -> bool:
        place = tenant.records.get(key)  # None: reserved, and not committed yet
        return place is not None and may_go(place)

    return evictable


def _ancestors(tenant: Tenant, key: ChunkKey | None) -> set[int]:
    """The places of what the chunk is known to continue, by their ids."""
    found: set[int] = set()
    while key is not None and (key := tenant.policy.before(key)) is not None:
        place = tenant.records.get(key)
        if place is not None:
            found.add(id(place))
    return found
