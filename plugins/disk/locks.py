"""Locks of the disk tier, for one event loop: per-key write locks and a priority semaphore for reads."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from typing import TYPE_CHECKING

from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator


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
    """Limit concurrent reads and admit waiters of older calls first.

    The records of one call are read together this way, so they can be verified and copied while those of the
    next call are read. In order of arrival, concurrent batches would all end at the same time.

    Args:
        slots: Number of reads allowed at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def acquire(self, priority: int) -> None:
        """Wait for a slot.

        Waiters are admitted in ascending order of `priority`, then in order of arrival. If the call is
        cancelled while waiting, no slot is taken.

        Args:
            priority: Number of the call; lower is older.
        """
        if self._free:
            self._free -= 1
            return
        admitted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Release a slot, to the next waiter if there is one."""
        while self._waiting:
            *_, admitted = heapq.heappop(self._waiting)
            if not admitted.done():
                admitted.set_result(None)
                return
        self._free += 1
