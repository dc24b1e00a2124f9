"""Whose read is next: the older call's, so that its records are proven and copied while the newer one's are read."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Turns:
    """A few turns at one time; who waits is served by the number of its call. Used on one loop's thread.

    Served in the order of arrival, batches that were asked for one after the other would all be read at
    the same pace and end together: nothing could be done with the first while the last is read.
    """

    def __init__(self, num_turns: int) -> None:
        self._free = num_turns
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, call: int) -> AsyncIterator[None]:
        """One turn for the call of that number; lower numbers come first."""
        await self._take(call)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, call: int) -> None:
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (call, next(self._arrivals), given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            *_, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
