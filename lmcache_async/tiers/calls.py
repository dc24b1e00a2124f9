"""Calls under way, and the wait for the last of them: what a tier has when it closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Calls:
    """Counts calls of one tier. Used on one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._ended: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A call is under way in the block."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count and self._ended is not None and not self._ended.done():
                self._ended.set_result(None)

    async def wait_ended(self) -> None:
        """Wait until none is under way; no new ones should begin meanwhile. One waits at a time.

        There is no deadline: who closes has made the calls end. Cancelled, it only stops to wait.
        """
        if not self._count:
            return
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._ended
        finally:
            self._ended = None
