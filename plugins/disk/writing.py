"""One attempt to write a record: room for it, its file, and what is in the index afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_async.plugins.disk.io import WriteJob
from lmcache_async.plugins.disk.workers import end

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from lmcache_async.errors import TierError
    from lmcache_async.plugins.disk.changing import ChangingKeys
    from lmcache_async.plugins.disk.index import DiskIndex, Reservation
    from lmcache_async.plugins.disk.io import RecordFiles, RoomResult
    from lmcache_async.plugins.disk.workers import Workers
    from lmcache_async.types import ChunkKey


class RecordWrites:
    """Writes records. Used on one loop's thread.

    Room is made by a thread of its own, ahead of the writes that wait for theirs: deleting a file of 16 MiB
    takes ext4 some 4 ms, half of what writing it takes.
    """

    def __init__(
        self, index: DiskIndex, files: RecordFiles, workers: Workers, changing: ChangingKeys
    ) -> None:
        self._index = index
        self._files = files
        self._workers = workers
        self._changing = changing

    async def attempt(
        self, key: ChunkKey, view: memoryview, *, evict_bytes: int = 0
    ) -> OSError | TierError | None:
        """Write and publish; else why not, and then nothing of the record is left.

        Args:
            view: As `WriteJob`'s.
            evict_bytes: As `DiskIndex.reserve`'s.

        Raises:
            TierFullError: There is no room, and none can be made.
        """
        reservation = self._index.reserve(key, len(view), busy=self._changing, evict_bytes=evict_bytes)
        victims = tuple(reservation.victims)
        condemned = tuple(key for key in self._index.condemned if key not in self._changing)
        room: Future[RoomResult] | None = None
        written: Future[OSError | TierError | None] | None = None
        with self._changing.change([*victims, *condemned]):
            try:
                if victims or condemned:
                    room = self._workers.start_beside(self._files.make_room, victims, condemned)
                    await end(room)
                if room is None or room.result().error is None:
                    job = WriteJob(key, view, reservation.entry.stamp)
                    written = self._workers.start(self._files.write, job)
                    await end(written)
            finally:
                self._settle(reservation, condemned, room, written)
        if written is not None:
            return written.result()
        return room.result().error if room is not None else None

    def _settle(
        self,
        reservation: Reservation,
        condemned: Sequence[ChunkKey],
        room: Future[RoomResult] | None,
        written: Future[OSError | TierError | None] | None,
    ) -> None:
        if room is None or not _came_to_end(room):
            left = frozenset(reservation.victims)
        else:
            left = room.result().left
            self._index.absolve([key for key in condemned if key not in left])
        if written is not None and _came_to_end(written) and written.result() is None:
            self._index.commit(reservation)
        else:
            self._index.cancel(reservation, left=left)


def _came_to_end(future: Future[Any]) -> bool:
    """Whether the call was made and raised nothing."""
    return future.done() and not future.cancelled() and future.exception() is None
