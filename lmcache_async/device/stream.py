"""Staging parts in flight: their pool, and the thread that waits for their device events.

Independent of CUDA, so that it is tested with fakes on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from lmcache_async.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PartT = TypeVar("PartT")
Prepared: TypeAlias = AbstractContextManager[Any]
_Watched: TypeAlias = "tuple[DeviceEvent, asyncio.AbstractEventLoop, Callable[[Exception | None], None]]"


class DeviceEvent(Protocol):
    """Event in a stream of a device."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached the event. Raises the error of the device."""


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Statistics of a `Lane`.

    Attributes:
        parts: Number of parts.
        free: Parts that are not acquired.
        waiting: Callers waiting for a part.
        waited: Number of calls that had to wait.
    """

    parts: int
    free: int
    waiting: int
    waited: int


class Lane(Generic[PartT]):
    """Parts of one direction, and a thread that waits for their events. Used on the thread of one event loop.

    Events are awaited in the order of the calls of `watch`. An event that is reached early resolves its
    future only after the events before it.

    Args:
        name: Name of the thread.
        parts: The parts, lent to one caller each.
        prepare: Context in which the thread waits.

    Attributes:
        closed: `close` was called.
    """

    def __init__(
        self, name: str, parts: Sequence[PartT], prepare: Callable[[], Prepared] = contextlib.nullcontext
    ) -> None:
        self.closed = False
        self._size = len(parts)
        self._free = deque(parts)
        self._turns = asyncio.Semaphore(len(parts))
        self._waiting = self._waited = 0
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    async def acquire(self) -> PartT:
        """Wait for a free part and take it, in FIFO order. If the call is cancelled, no part is taken."""
        self._waiting += 1
        self._waited += self._turns.locked()
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        return self._free.popleft()

    def release(self, part: PartT) -> None:
        self._free.append(part)
        self._turns.release()

    def watch(self, part: PartT, event: DeviceEvent) -> asyncio.Future[None]:
        """Release the part when the device has reached `event` or failed.

        Returns:
            A future of the running loop that is resolved then, or fails with the error of the device.

        Raises:
            EngineClosedError: The lane is closed.
        """
        if self.closed:
            raise EngineClosedError("the copier is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            self.release(part)
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._watched.put((event, loop, settle))
        return future

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(self._size, len(self._free), self._waiting, self._waited)

    def close(self) -> None:
        """Wait for all watched events, then end the thread. Idempotent."""
        if not self.closed:
            self.closed = True
            self._watched.put(None)
            self._thread.join()

    def _wait(self, prepare: Callable[[], Prepared]) -> None:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):  # the events then report what is wrong
                stack.enter_context(prepare())
            while (watched := self._watched.get()) is not None:
                event, loop, settle = watched
                error: Exception | None = None
                try:
                    event.synchronize()
                except Exception as failure:  # noqa: BLE001  set on the future
                    error = failure
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(settle, error)
