"""Leases taken by lookups, so that what was promised is still there when it is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache_async.memory.buffer import Buffer


class Pins:
    """Leases by lookup id, bounded in number and in time. Used on the loop's thread.

    Args:
        max_buffers: Most buffers pinned at one time; more are not taken.
        ttl_s: Seconds after which a forgotten pin ends by itself.
    """

    def __init__(self, *, max_buffers: int, ttl_s: float) -> None:
        self.max_buffers = max_buffers
        self._ttl_s = ttl_s
        self._held: dict[str, tuple[list[Buffer], asyncio.TimerHandle]] = {}
        self._closed = False
        self.count = 0

    @property
    def room(self) -> int:
        return max(0, self.max_buffers - self.count)

    def hold(self, lookup_id: str, buffers: Sequence[Buffer]) -> int:
        """Take over the leases, beside those of the same id, and give back those there is no room for.

        All of an id end together, and the time begins anew.

        Returns:
            How many were kept; the first ones.
        """
        room = 0 if self._closed else self.room
        kept = list(buffers[:room])
        for buffer in buffers[room:]:
            buffer.release()
        if not kept:
            return 0
        added = len(kept)
        self.count += added
        if lookup_id in self._held:
            former, timer = self._held[lookup_id]
            timer.cancel()
            former.extend(kept)
            kept = former
        timer = asyncio.get_running_loop().call_later(self._ttl_s, self.release, lookup_id)
        self._held[lookup_id] = (kept, timer)
        return added

    def release(self, lookup_id: str) -> None:
        held = self._held.pop(lookup_id, None)
        if held is None:
            return
        buffers, timer = held
        timer.cancel()
        self.count -= len(buffers)
        for buffer in buffers:
            buffer.release()

    def close(self) -> None:
        """End every pin; what a lookup under way still brings is given back at once."""
        self._closed = True
        for lookup_id in list(self._held):
            self.release(lookup_id)
