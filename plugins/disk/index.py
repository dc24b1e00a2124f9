"""In-memory state of the disk tier: the index with exact byte counts and eviction order, and locks of keys. No I/O."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lmcache_async.errors import TierFullError
from lmcache_async.tiers.eviction import LRUPolicy
from lmcache_async.tiers.offline import StoredRecord
from lmcache_async.types import ChunkKey

# Difference between the stamps of two consecutive chunks of a prompt. Larger than the time resolution of file systems.
STAMP_STEP_NS = 1000
# Minimum time between two stamps of a chunk that is in use.
STAMP_AGE_NS = 60 * 10**9


@dataclass(slots=True, eq=False)
class Entry:
    """A published record.

    Attributes:
        stamp: Time of its last known use in ns; less than that of the preceding chunk of its prompt.
    """

    nbytes: int
    stamp: int


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Bytes reserved for a record that is being written, until `commit` or `cancel`.

    Attributes:
        victims: Records to delete first. They are no longer in the index; their bytes are still counted.
        links: The chunk before each victim in its prompt, if it is known.
        held_bytes: Bytes counted for the record and the victims: the larger of the two.
    """

    key: ChunkKey
    entry: Entry
    victims: dict[ChunkKey, Entry]
    links: dict[ChunkKey, ChunkKey]
    held_bytes: int


class DiskIndex:
    """The records of one directory. Used on one thread.

    `used_bytes` never exceeds `max_bytes`. At every moment it is at least the size of all record files,
    including those being written.

    Attributes:
        used_bytes: Bytes of the records, the reservations and the records that were taken.
        policy: Order of eviction. Uses of chunks are recorded there.
        undeletable: Records that must not be served and could not be deleted. Their bytes are counted.
    """

    def __init__(self, max_bytes: int, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.evictions = 0
        self.undeletable: dict[ChunkKey, Entry] = {}
        self.on_evicted: Callable[[Sequence[ChunkKey]], None] | None = None
        self._clock_ns = clock_ns
        self._entries: dict[ChunkKey, Entry] = {}
        self._reserved: dict[ChunkKey, Entry] = {}
        self.policy = LRUPolicy()
        self._readers: Counter[ChunkKey] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def entry(self, key: ChunkKey) -> Entry | None:
        return self._entries.get(key)

    def load(self, files: Sequence[StoredRecord]) -> list[ChunkKey]:
        """Add the records of the directory. Return those to delete: the least recently used beyond `max_bytes`.

        Stamps in the future or before the epoch come from another clock or an edited file. They keep their
        order and are limited to the range from 0 to now.
        """
        now = self._clock_ns()
        # A file larger than `max_bytes` is deleted by itself; the others need not be evicted for it.
        too_large = [file.key for file in files if file.nbytes > self.max_bytes]
        for file in sorted(files, key=lambda file: file.used_ns):
            if file.nbytes <= self.max_bytes:
                self._insert(file.key, Entry(file.nbytes, min(max(file.used_ns, 0), now)))
        victims = self.policy.evict(self.used_bytes - self.max_bytes, lambda _: True)
        for key in victims:
            self.used_bytes -= self._entries.pop(key).nbytes
        victims += too_large
        self.evictions += len(victims)
        return victims

    def begin_reading(self, key: ChunkKey) -> None:
        """Exclude the record from eviction until `end_reading`."""
        self._readers[key] += 1

    def end_reading(self, key: ChunkKey) -> None:
        self._readers[key] -= 1
        if not self._readers[key]:
            del self._readers[key]

    def reserve(
        self, key: ChunkKey, nbytes: int, *, busy: Container[ChunkKey], evict_bytes: int = 0
    ) -> Reservation:
        """Reserve bytes for a record that is not in the index. Evict records if necessary.

        Args:
            busy: Records that must not be evicted now, in addition to those being read.
            evict_bytes: Minimum number of bytes to evict, even if there seems to be room.

        Raises:
            TierFullError: Not enough bytes can be evicted; none were.
        """
        if nbytes > self.max_bytes:
            raise TierFullError(f"a record of {nbytes} bytes is more than max_bytes of {self.max_bytes}")
        missing = max(self.used_bytes + nbytes - self.max_bytes, evict_bytes)
        # Added to the policy first, so that the preceding chunks of its prompt are not evicted for it.
        self.policy.add(key, nbytes)
        links: dict[ChunkKey, ChunkKey] = {}
        victims = self.policy.evict(
            missing, lambda k: k in self._entries and k not in self._readers and k not in busy, links=links
        )
        if missing > 0 and not victims:
            self.policy.discard(key)
            raise TierFullError(
                f"cannot reserve {nbytes} bytes: {self.used_bytes} of {self.max_bytes} are used,"
                " and the records that could be evicted are in use or too small"
            )
        entries = {victim: self._entries.pop(victim) for victim in victims}
        freed = sum(entry.nbytes for entry in entries.values())
        entry = Entry(nbytes, self._next_stamp(key))
        held_bytes = max(nbytes, freed)
        self.used_bytes += held_bytes - freed
        self._reserved[key] = entry
        return Reservation(key, entry, entries, links, held_bytes)

    def commit(self, reservation: Reservation) -> None:
        """Add the record: it is published and the victims are deleted."""
        del self._reserved[reservation.key]
        self.drop_undeletable([reservation.key])  # the new file has replaced it
        self._entries[reservation.key] = reservation.entry
        self.used_bytes += reservation.entry.nbytes - reservation.held_bytes
        self._report_evicted(list(reservation.victims))

    def cancel(self, reservation: Reservation, *, left: Collection[ChunkKey]) -> None:
        """Release the reservation: nothing was published, and the victims named in `left` are still on disk."""
        del self._reserved[reservation.key]
        self.policy.discard(reservation.key)
        self.used_bytes -= reservation.held_bytes
        for key, entry in reversed(reservation.victims.items()):  # the first to evict is restored last
            if key in left:
                self._entries[key] = entry
                self.policy.restore(key, entry.nbytes, reservation.links.get(key))
                self.used_bytes += entry.nbytes
        self._report_evicted([key for key in reservation.victims if key not in left])

    def take(self, key: ChunkKey) -> Entry | None:
        """Remove a record that is to be deleted. Its bytes are counted until `forget` or `restore`."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.policy.discard(key)
        return entry

    def forget(self, entry: Entry) -> None:
        """Stop counting a taken record: its file was deleted."""
        self.used_bytes -= entry.nbytes

    def restore(self, key: ChunkKey, entry: Entry) -> None:
        """Add a taken record again: its file could not be deleted."""
        self.used_bytes -= entry.nbytes
        self._insert(key, entry)

    def add_undeletable(self, key: ChunkKey, entry: Entry) -> None:
        """Keep counting a taken record: its file could not be deleted and must not be served."""
        self.undeletable[key] = entry

    def drop_undeletable(self, keys: Collection[ChunkKey]) -> None:
        """Stop counting undeletable records: their files were deleted or replaced."""
        for key in keys:
            if (entry := self.undeletable.pop(key, None)) is not None:
                self.used_bytes -= entry.nbytes

    def restamp(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, int]]:
        """Set new stamps of chunks of one prompt that were read, and of the chunks before them. Return keys and stamps.

        Chunks with a recent stamp are left out: stamps only determine the eviction order after a restart.
        """
        stale = self._clock_ns() - STAMP_AGE_NS
        chain = [key for key in reversed(keys) if key in self._entries]
        before = self.policy.before(chain[-1]) if chain else None
        while before is not None and before in self._entries and self._entries[before].stamp <= stale:
            chain.append(before)
            before = self.policy.before(before)
        stamps = []
        for key in reversed(chain):
            entry = self._entries[key]
            if entry.stamp <= stale:
                entry.stamp = self._next_stamp(key)
                stamps.append((key, entry.stamp))
        return stamps

    def _insert(self, key: ChunkKey, entry: Entry) -> None:
        self._entries[key] = entry
        self.policy.add(key, entry.nbytes)
        self.used_bytes += entry.nbytes

    def _next_stamp(self, key: ChunkKey) -> int:
        now = max(0, self._clock_ns())  # a file cannot have a time before the epoch
        before = self.policy.before(key)
        if before is None:
            return now
        entry = self._entries.get(before) or self._reserved.get(before)
        return now if entry is None else min(now, max(0, entry.stamp - STAMP_STEP_NS))

    def _report_evicted(self, keys: Sequence[ChunkKey]) -> None:
        self.evictions += len(keys)
        self.report_removed(keys)

    def report_removed(self, keys: Sequence[ChunkKey]) -> None:
        """Publish that the tier has removed records by itself."""
        if keys and self.on_evicted is not None:
            self.on_evicted(keys)


class KeyLocks:
    """Per-key write and delete locks. Contains the keys that are locked."""

    def __init__(self) -> None:
        self._released: dict[ChunkKey, asyncio.Future[None]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._released

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._released)

    async def wait_released(self, key: ChunkKey) -> None:
        """Wait until the lock of the key is released. It may be locked again at once."""
        if (released := self._released.get(key)) is not None:
            await asyncio.wait([released])

    @contextlib.asynccontextmanager
    async def locked(self, key: ChunkKey) -> AsyncIterator[None]:
        """Wait for the lock of the key and hold it in the block."""
        while key in self._released:
            await self.wait_released(key)
        with self.locked_now([key]):
            yield

    @contextlib.contextmanager
    def locked_now(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Lock the keys for the block, without waiting. None of them may be locked already."""
        released = asyncio.get_running_loop().create_future()
        keys = tuple(keys)
        self._released.update(dict.fromkeys(keys, released))
        try:
            yield
        finally:
            for key in keys:
                del self._released[key]
            released.set_result(None)
