"""Counter of running calls, with a wait for the last one when a tier is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Calls:
    """Counts running calls of one tier. Used on one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._ended: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count a call for the duration of the block."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count and self._ended is not None and not self._ended.done():
                self._ended.set_result(None)

    async def wait_ended(self) -> None:
        """Wait until no call is running. No call may start in the meantime, and only one task may wait.

        There is no deadline: the caller must already have made the calls end. Cancellation only stops the
        wait.
        """
        if not self._count:
            return
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._ended
        finally:
            self._ended = None
