"""Locks of the disk tier, for one event loop: per-key write locks and a priority semaphore for reads."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from typing import TYPE_CHECKING

from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator


class KeyLocks:
    """Per-key write and delete locks. A collection of the locked keys."""

    def __init__(self) -> None:
        self._released: dict[ChunkKey, asyncio.Future[None]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._released

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._released)

    def __len__(self) -> int:
        return len(self._released)

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
        """Hold the locks of keys that are not locked in the block, without waiting."""
        released = asyncio.get_running_loop().create_future()
        keys = tuple(keys)
        self._released.update(dict.fromkeys(keys, released))
        try:
            yield
        finally:
            for key in keys:
                del self._released[key]
            released.set_result(None)


class PrioritySemaphore:
    """Limit concurrent reads and admit those of older calls first.

    The records of one call are read together this way, so they can be verified and copied while those of the
    next call are read. In order of arrival, concurrent batches would all end at the same time.

    Args:
        slots: Number of reads allowed at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Callable[[], bool]]] = []

    def submit(self, priority: int, start: Callable[[], bool]) -> None:
        """Call `start` when there is a slot, now or in a later `release`.

        Calls are made in ascending order of `priority`, then in order of arrival.

        Args:
            priority: Number of the call; lower is older.
            start: Starts the read and returns True, or returns False if it does not use the slot.
        """
        if not self._free:
            heapq.heappush(self._waiting, (priority, next(self._arrivals), start))
        elif start():
            self._free -= 1

    def release(self) -> None:
        """Release the slot of a started read."""
        while self._waiting:
            *_, start = heapq.heappop(self._waiting)
            if start():
                return
        self._free += 1
