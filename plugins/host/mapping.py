"""The daemon's memory in this process: what is leased of it, and when nobody looks there any more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from lmcache_async.memory.buffer import PAGE, Buffer, Slab

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from lmcache_async.daemon.messages import Grant
    from lmcache_async.memory.buffer import Bytes
    from lmcache_async.memory.region import Region

UNMAP_S = 5.0
"""Longest wait for the memory to be unpinned and unmapped."""


class Mapping:
    """Owns the mapping, and the last hold on the connection whose end would free what is leased.

    That hold, a duplicate of the socket, is let go when the connection has ended *and* no slab is leased
    or looked at *and* no copy runs: before, the daemon must not give the memory to anybody else.

    Args:
        region: The memory. It is closed with the last use of it, by a thread: pinning and unpinning a whole
            pool takes seconds, and whoever ends the last use, the loop too, must not be held up by that.
        anchor: The duplicate.
        give_back: Called in the loop with leases that are over, while the connection is there.
    """

    def __init__(self, region: Region, anchor: socket.socket) -> None:
        self._region = region
        self._anchor = anchor
        self._loop = asyncio.get_running_loop()
        self._give_back: Callable[[list[int]], None] | None = None
        # Held here: a slab that only its own weak reference's callback knows would be garbage, and lost.
        self._slabs: dict[int, Slab] = {}
        self._idle: deque[Slab] = deque()  # without a lease or a view, put here by any thread
        self._flush_is_due = False
        self._copies = 0
        self._ended = False
        self._let_go = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        # The thread waits for a word from the start: a slab may become idle in a garbage collection, which
        # is no place to start one. A SimpleQueue, unlike an Event, can be put to from there.
        self._last_word: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._close, name="lmcache-async-host-unmap", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return self._region.nbytes

    @property
    def pinned_bytes(self) -> int:
        return self._region.pinned_bytes

    @property
    def leases(self) -> int:
        """Slabs that are leased or looked at."""
        return len(self._slabs)

    @property
    def closed(self) -> bool:
        """Whether the memory is unpinned and unmapped."""
        return self._closed.done()

    async def wait_closed(self) -> None:
        """Wait, `UNMAP_S` at most, until the memory is closed; not for leases, which are others' to end."""
        if self._let_go:
            await asyncio.wait([self._closed], timeout=UNMAP_S)
        if self.closed:
            self._thread.join()  # it has nothing more to do

    def begin(self, give_back: Callable[[list[int]], None]) -> None:
        """The connection is there: from now on it is told of leases that are over."""
        self._give_back = give_back

    def lend(self, grant: Grant) -> Buffer:
        """The record as a buffer; the lease is given back when nobody looks there any more."""
        nbytes = -(-grant.nbytes // PAGE) * PAGE
        slab = Slab(self._usable(), grant.lease, nbytes, self, offset=grant.offset, common=True)
        self._slabs[grant.lease] = slab
        return Buffer(slab, grant.nbytes)

    def target(self, grant: Grant) -> Bytes:
        """The memory of a reservation, to be written to between `begin_copy` and `end_copy`."""
        return np.frombuffer(self._usable().view, dtype=np.uint8, count=grant.nbytes, offset=grant.offset)

    def begin_copy(self) -> None:
        self._copies += 1

    def end_copy(self) -> None:
        self._copies -= 1
        if self._ended:
            self._settle()

    def end(self) -> None:
        """The connection has ended."""
        self._ended = True
        self._settle()

    # What slabs tell us.

    def lease_ended(self, slab: Slab) -> None:
        """Of no matter by itself: the daemon is told when the slab is idle."""

    def slab_idle(self, slab: Slab) -> None:
        self._idle.append(slab)
        if self._ended:
            self._settle()
        elif not self._flush_is_due:
            self._flush_is_due = True
            with contextlib.suppress(RuntimeError):  # the loop is closed; `end` sees to it
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Tell the daemon of all leases that are over; in the loop."""
        self._flush_is_due = False
        if self._ended:
            self._settle()
            return
        leases = [slab.index for slab in self._take_idle()]
        if leases and self._give_back is not None:
            self._give_back(leases)

    def _take_idle(self) -> list[Slab]:
        taken: list[Slab] = []
        with contextlib.suppress(IndexError):  # another thread may be at it as well
            while True:
                slab = self._idle.popleft()
                self._slabs.pop(slab.index, None)
                taken.append(slab)
        return taken

    def _usable(self) -> Region:
        if self._let_go:
            raise ValueError("the mapping is closed")
        return self._region

    def _settle(self) -> None:
        """Let go of everything if this was the last use. From any thread, more than once."""
        self._take_idle()
        if not self._slabs and not self._copies:
            self._let_go = True
            self._anchor.close()
            self._last_word.put(None)

    def _close(self) -> None:
        self._last_word.get()
        self._region.close(own_thread=True)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._closed.set_result, None)
