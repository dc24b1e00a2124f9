"""Mapping of the daemon's memory: leases of slabs, and unmapping after the last use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from lmcache_async.daemon.messages import Grant
from lmcache_async.memory.buffer import Buffer, Bytes, Slab, pages
from lmcache_async.memory.region import Region

UNMAP_S = 5.0
"""Longest wait for the memory to be unpinned and unmapped, in seconds."""


class Mapping:
    """Owns the mapped memory and a duplicate of the connection's socket.

    The daemon frees the leases of a client when the connection is closed, and may then reuse their memory. The
    duplicate keeps the connection open until the transport is closed, no slab is leased or referenced, and no copy
    is running.

    Args:
        region: The memory. A thread closes it after the last use: unpinning a whole pool takes seconds, and
            must block neither the event loop nor another caller.
        socket_copy: The duplicate of the socket.
        release_leases: Called on the loop with the numbers of ended leases, until the connection has ended.
    """

    def __init__(
        self, region: Region, socket_copy: socket.socket, release_leases: Callable[[list[int]], None]
    ) -> None:
        self._region = region
        self._socket_copy = socket_copy
        self._loop = asyncio.get_running_loop()
        self._release_leases = release_leases
        # Keeps slabs alive: otherwise only the callback of their own weak reference would refer to them.
        self._slabs: dict[int, Slab] = {}
        self._idle: deque[Slab] = deque()  # without a lease or a view; appended by any thread
        self._flush_is_scheduled = False
        self._copies = 0
        self._ended = False
        self._is_closing = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        # Started now, because a slab may become idle during a garbage collection, where no thread can be
        # started. The put of a SimpleQueue is reentrant and can be called there, unlike the set of an Event.
        self._close_request: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._close, name="lmcache-async-host-unmap", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return self._region.nbytes

    @property
    def closed(self) -> bool:
        """Whether the memory is unpinned and unmapped."""
        return self._closed.done()

    async def wait_closed(self) -> None:
        """Wait until the memory is unmapped, at most `UNMAP_S`; not at all while slabs are in use."""
        if self._is_closing:
            await asyncio.wait([self._closed], timeout=UNMAP_S)
        if self.closed:
            self._thread.join()  # its last call is done

    def lend(self, grant: Grant) -> Buffer:
        """Return the record as a buffer. The lease is released when no buffer or view refers to the slab."""
        slab = Slab(self._usable(), grant.lease, pages(grant.nbytes), self, offset=grant.offset, common=True)
        self._slabs[grant.lease] = slab
        return Buffer(slab, grant.nbytes)

    def target(self, grant: Grant) -> Bytes:
        """Return the memory of a reservation. Write to it only between `begin_copy` and `end_copy`."""
        return np.frombuffer(self._usable().view, dtype=np.uint8, count=grant.nbytes, offset=grant.offset)

    def begin_copy(self) -> None:
        self._copies += 1

    def end_copy(self) -> None:
        self._copies -= 1
        if self._ended:
            self._close_if_unused()

    def end(self) -> None:
        """Note the end of the connection."""
        self._ended = True
        self._close_if_unused()

    # Callbacks of slabs

    def lease_ended(self, slab: Slab) -> None:
        """Do nothing: the lease is released when the slab is idle."""

    def slab_idle(self, slab: Slab) -> None:
        self._idle.append(slab)
        if self._ended:
            self._close_if_unused()
        elif not self._flush_is_scheduled:
            self._flush_is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed; `end` releases the slabs
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Release the leases of idle slabs. Called on the loop."""
        self._flush_is_scheduled = False
        if self._ended:
            self._close_if_unused()
            return
        leases = [slab.index for slab in self._take_idle()]
        if leases:
            self._release_leases(leases)

    def _take_idle(self) -> list[Slab]:
        taken: list[Slab] = []
        with contextlib.suppress(IndexError):  # another thread may take slabs too
            while True:
                slab = self._idle.popleft()
                self._slabs.pop(slab.index, None)
                taken.append(slab)
        return taken

    def _usable(self) -> Region:
        if self._is_closing:
            raise ValueError("the mapping is closed")
        return self._region

    def _close_if_unused(self) -> None:
        """Close the socket and unmap the memory if it is unused. May be called more than once, from any thread."""
        self._take_idle()
        if not self._slabs and not self._copies:
            self._is_closing = True
            self._socket_copy.close()
            self._close_request.put(None)

    def _close(self) -> None:
        self._close_request.get()
        self._region.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits
            self._loop.call_soon_threadsafe(self._closed.set_result, None)
