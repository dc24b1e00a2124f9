"""Pool of staging parts, and device events as awaitables.

Independent of CUDA, so that it is tested with fakes on any machine.
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
    """Event in a stream of a device."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached the event. Raises the error of the device."""


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Statistics of a `Ring`.

    Attributes:
        parts: Number of parts.
        free: Parts that are not acquired.
        waiting: Callers waiting for a part.
        waited: Number of calls that had to wait since the ring was created.
    """

    parts: int
    free: int
    waiting: int
    waited: int


class Ring(Generic[PartT]):
    """Pool of a fixed set of parts, for one event loop. Waiters are served in FIFO order."""

    def __init__(self, parts: Iterable[PartT]) -> None:
        self._free = deque(parts)
        self._size = len(self._free)
        self._waiters: deque[asyncio.Future[PartT]] = deque()
        self._waited = 0

    async def acquire(self) -> PartT:
        """Wait for a free part and take it. If the call is cancelled, no part is taken."""
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
        """Return a part to the pool, or pass it to the longest waiting caller."""
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
    """Thread that waits for device events and resolves their futures.

    Events are awaited in the order of the calls of `watch`. An event that is reached early resolves its
    future only after the events before it.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._reap, name=name, daemon=True)
        self._thread.start()

    def watch(self, event: DeviceEvent, on_passed: Callable[[], None]) -> asyncio.Future[None]:
        """Return a future of the running loop that is resolved when the device has reached `event` or failed.

        Args:
            event: Event to wait for.
            on_passed: Called once on the thread of the loop, just before the future is resolved, also if the
                future is cancelled or the device failed.

        Raises:
            EngineClosedError: The reaper is closed.
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
        """Wait for all watched events, then end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _reap(self) -> None:
        while (watched := self._queue.get()) is not None:
            error: Exception | None = None
            try:
                watched.event.synchronize()
            except Exception as failure:  # noqa: BLE001  set on the future
                error = failure
            try:
                watched.loop.call_soon_threadsafe(watched.settle, error)
            except RuntimeError:
                continue  # the loop is closed
