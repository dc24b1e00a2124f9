"""Side streams: parts of device memory in flight, and device events turned into awaitables.

Nothing here names CUDA: the rules of parts and events are tested with fakes on any machine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lmcache_async.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PartT = TypeVar("PartT")


class DeviceEvent(Protocol):
    """A mark in a device's queue of work."""

    def synchronize(self) -> None:
        """Block this thread until the device has passed the mark; raises what the device failed with."""


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Parts of a ring.

    Attributes:
        parts: How many there are.
        free: Parts that nobody holds.
        waiting: Callers that wait for one.
        waited: Times that a caller had to wait since the ring was made.
    """

    parts: int
    free: int
    waiting: int
    waited: int


class Ring(Generic[PartT]):
    """A fixed set of parts, lent one at a time, first come first served. For one event loop's thread."""

    def __init__(self, parts: Iterable[PartT]) -> None:
        self._free = deque(parts)
        self._size = len(self._free)
        self._waiters: deque[asyncio.Future[PartT]] = deque()
        self._waited = 0

    async def acquire(self) -> PartT:
        """A part, as soon as one is free. Cancelled, none was taken."""
        if self._free and not self._waiters:
            return self._free.popleft()
        self._waited += 1
        waiter: asyncio.Future[PartT] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(waiter.result())
            else:
                self._waiters.remove(waiter)
            raise

    def release(self, part: PartT) -> None:
        """Give a part back; the longest waiting caller gets it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(part)
                return
        self._free.append(part)

    def statistics(self) -> RingStatistics:
        return RingStatistics(self._size, len(self._free), len(self._waiters), self._waited)


@dataclass(frozen=True, slots=True)
class _Watched:
    event: DeviceEvent
    loop: asyncio.AbstractEventLoop
    settle: Callable[[Exception | None], None]


class Reaper:
    """One thread that waits for events, in the order in which they were handed over, and wakes their awaiters.

    Hand over events of one queue of work: one that comes early is noticed only after those before it.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._reap, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: DeviceEvent, on_passed: Callable[[], None]) -> asyncio.Future[None]:
        """A future of the running loop that ends when the device has passed `event`, or failed.

        `on_passed` is called on the loop's thread just before, once, whatever becomes of the future.
        """
        if self._closed:
            raise EngineClosedError("the copier is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            on_passed()
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._queue.put(_Watched(event, loop, settle))
        return future

    def close(self) -> None:
        """Wait for every event handed over, then end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _reap(self) -> None:
        while (watched := self._queue.get()) is not None:
            error: Exception | None = None
            try:
                watched.event.synchronize()
            except Exception as failure:  # noqa: BLE001  the device's error belongs to the awaiter, not to us
                error = failure
            try:
                watched.loop.call_soon_threadsafe(watched.settle, error)
            except RuntimeError:
                # The loop was closed while the device worked: nobody is left to be told.
                continue
