"""What is on disk and what may be: exact bytes, and the order of eviction. No I/O."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.errors import TierFullError
from lmcache_async.tiers.eviction import LRUPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from lmcache_async.plugins.disk.directory import Found
    from lmcache_async.types import ChunkKey

# Between the stamps of a chunk and its continuation. Above what file systems round times to.
STAMP_STEP_NS = 1000
# A chunk in use gets a new stamp at most this often.
STAMP_AGE_NS = 60 * 10**9


@dataclass(slots=True, eq=False)
class Entry:
    """A published record.

    Attributes:
        nbytes: Of its file.
        stamp: When it was last known to be used, in ns; less than that of the chunk that it continues.
    """

    nbytes: int
    stamp: int


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Bytes set aside for a record that is being written, until `commit` or `cancel`.

    Attributes:
        victims: Records to be deleted first. They are out of the index; their bytes are counted on.
        held_bytes: What counts for both: the larger of the new record and the victims.
    """

    key: ChunkKey
    entry: Entry
    victims: dict[ChunkKey, Entry]
    held_bytes: int


class DiskIndex:
    """The records of one directory, on one thread.

    `used_bytes` never exceeds `max_bytes`, and covers at every moment what the record files and those
    being written have on disk.

    Attributes:
        condemned: Records that must not be given any more and could not be deleted; their bytes count.
        on_evicted: Told of records given up for room, where somebody wants to know.
    """

    def __init__(self, max_bytes: int, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.evictions = 0
        self.condemned: dict[ChunkKey, Entry] = {}
        self.on_evicted: Callable[[Sequence[ChunkKey]], None] | None = None
        self._clock_ns = clock_ns
        self._entries: dict[ChunkKey, Entry] = {}
        self._reserved: dict[ChunkKey, Entry] = {}
        self._policy = LRUPolicy()
        self._readers: Counter[ChunkKey] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def entry(self, key: ChunkKey) -> Entry | None:
        return self._entries.get(key)

    def load(self, found: Sequence[Found]) -> list[ChunkKey]:
        """Take over what the directory has; the least recently used that are too many, to be deleted.

        Stamps of the future, or from before the epoch, come from another clock or somebody's hand. They
        keep their order; but for ever they would be the newest, or be what no file can have.
        """
        now = self._clock_ns()
        # A file larger than all that may be held makes room for nothing: it goes, the others stay.
        too_large = [record.key for record in found if record.nbytes > self.max_bytes]
        for record in sorted(found, key=lambda record: record.stamp):
            if record.nbytes <= self.max_bytes:
                self._insert(record.key, Entry(record.nbytes, min(max(record.stamp, 0), now)))
        excess = self.used_bytes - self.max_bytes
        victims = self._policy.evict(excess, lambda _: True)
        for key in victims:
            self.used_bytes -= self._entries.pop(key).nbytes
        victims += too_large
        self.evictions += len(victims)
        return victims

    def touch(self, keys: Sequence[ChunkKey], *, gapless: bool) -> None:
        """One prompt's chunks were asked for, in prefix order."""
        self._policy.touch(keys, gapless=gapless)

    def touch_each(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks of one or several prompts were put, each prompt's in prefix order."""
        for key in reversed(keys):
            self._policy.touch([key])

    @contextlib.contextmanager
    def reading(self, key: ChunkKey) -> Iterator[None]:
        """Meanwhile the record is not evicted."""
        self._readers[key] += 1
        try:
            yield
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def reserve(
        self, key: ChunkKey, nbytes: int, *, busy: Collection[ChunkKey], evict_bytes: int = 0
    ) -> Reservation:
        """Room for a record that is not in the index, by eviction if need be.

        Args:
            busy: Records that must not be evicted now, besides those being read.
            evict_bytes: Evict that much at least, though there seems to be room.

        Raises:
            TierFullError: There is not enough that may be evicted; nothing was.
        """
        if nbytes > self.max_bytes:
            raise TierFullError(f"a record of {nbytes} bytes is more than the tier's {self.max_bytes}")
        missing = max(self.used_bytes + nbytes - self.max_bytes, evict_bytes)
        # Held in the policy first, so that room is not made by evicting what it continues.
        self._policy.add(key, nbytes)
        victims = self._policy.evict(
            missing, lambda k: k in self._entries and k not in self._readers and k not in busy
        )
        if missing > 0 and not victims:
            self._policy.discard(key)
            raise TierFullError(
                f"{nbytes} bytes are not to be had: {self.used_bytes} of {self.max_bytes} are used,"
                " and what could be given up is in use or too little"
            )
        entries = {victim: self._entries.pop(victim) for victim in victims}
        freed = sum(entry.nbytes for entry in entries.values())
        entry = Entry(nbytes, self._next_stamp(key))
        held_bytes = max(nbytes, freed)
        self.used_bytes += held_bytes - freed
        self._reserved[key] = entry
        return Reservation(key, entry, entries, held_bytes)

    def commit(self, reservation: Reservation) -> None:
        """The victims are deleted and the record is published."""
        del self._reserved[reservation.key]
        self.absolve([reservation.key])  # the new file lies in its place
        self._entries[reservation.key] = reservation.entry
        self.used_bytes += reservation.entry.nbytes - reservation.held_bytes
        self._evicted(list(reservation.victims))

    def cancel(self, reservation: Reservation, *, left: Collection[ChunkKey]) -> None:
        """Nothing was published; the victims named in `left` are on disk still."""
        del self._reserved[reservation.key]
        self._policy.discard(reservation.key)
        self.used_bytes -= reservation.held_bytes
        for key, entry in reservation.victims.items():
            if key in left:
                self._insert(key, entry)
        self._evicted([key for key in reservation.victims if key not in left])

    def take(self, key: ChunkKey) -> Entry | None:
        """Out of the index, to be deleted; its bytes count until `forget` or `restore`."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._policy.discard(key)
        return entry

    def condemn(self, key: ChunkKey, entry: Entry) -> None:
        """The file of an entry taken could not be deleted, and must not be used."""
        self.condemned[key] = entry

    def absolve(self, keys: Collection[ChunkKey]) -> None:
        """The files of those condemned are no more."""
        for key in keys:
            if (entry := self.condemned.pop(key, None)) is not None:
                self.used_bytes -= entry.nbytes

    def forget(self, entry: Entry) -> None:
        """The file of an entry taken is no more."""
        self.used_bytes -= entry.nbytes

    def restore(self, key: ChunkKey, entry: Entry) -> None:
        """The file of an entry taken could not be deleted."""
        self.used_bytes -= entry.nbytes
        self._insert(key, entry)

    def restamp(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, int]]:
        """New stamps for chunks of one prompt that were read, and for what they continue.

        None for those stamped a moment ago: the stamps only serve the order after a restart.
        """
        stale = self._clock_ns() - STAMP_AGE_NS
        chain = [key for key in reversed(keys) if key in self._entries]
        before = self._policy.before(chain[-1]) if chain else None
        while before is not None and before in self._entries and self._entries[before].stamp <= stale:
            chain.append(before)
            before = self._policy.before(before)
        stamps = []
        for key in reversed(chain):
            entry = self._entries[key]
            if entry.stamp <= stale:
                entry.stamp = self._next_stamp(key)
                stamps.append((key, entry.stamp))
        return stamps

    def _insert(self, key: ChunkKey, entry: Entry) -> None:
        self._entries[key] = entry
        self._policy.add(key, entry.nbytes)
        self.used_bytes += entry.nbytes

    def _next_stamp(self, key: ChunkKey) -> int:
        now = self._clock_ns()
        before = self._policy.before(key)
        if before is None:
            return now
        entry = self._entries.get(before) or self._reserved.get(before)
        return now if entry is None else min(now, entry.stamp - STAMP_STEP_NS)

    def _evicted(self, keys: Sequence[ChunkKey]) -> None:
        self.evictions += len(keys)
        if keys and self.on_evicted is not None:
            self.on_evicted(keys)
