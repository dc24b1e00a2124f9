"""Connection to the daemon with reconnects in the background."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from lmcache_async.errors import TierClosedError, TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger

if TYPE_CHECKING:
    from lmcache_async.daemon.messages import Figures
    from lmcache_async.plugins.host.connection import Connection, Dialer
    from lmcache_async.plugins.host.mapping import Mapping

logger = LimitedLogger(logging.getLogger(__name__))

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0


class Link:
    """Keeps one connection open and reconnects after it is lost.

    Attributes:
        connected: Set while there is a connection.
    """

    def __init__(self, dialer: Dialer) -> None:
        self.connected = asyncio.Event()
        self._dialer = dialer
        self._connection: Connection | None = None
        self._lost = asyncio.Event()
        self._reason: TierError = TierUnavailableError(f"{dialer.where}: not connected")
        self._task: asyncio.Task[None] | None = None
        self._mappings: list[Mapping] = []  # of connections that have ended
        self._evictions = 0  # of connections that have ended
        self._first = 0  # evictions before the current connection

    @property
    def connection(self) -> Connection:
        """The current connection.

        Raises:
            TierUnavailableError: There is no connection.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            raise self._reason.with_traceback(None)
        return connection

    @property
    def figures(self) -> Figures | None:
        """Figures in the last answer; None without a connection."""
        return None if self._connection is None else self._connection.figures

    @property
    def evictions(self) -> int:
        """Evictions of the tenant while this process was connected."""
        figures = self.figures
        return self._evictions + (0 if figures is None else figures.evictions - self._first)

    async def open(self) -> None:
        """Connect. If the daemon cannot be reached, keep trying in the background."""
        try:
            await self._dial()
        except TierUnavailableError as error:
            logger.report(
                "open", "the host tier misses every chunk until its daemon can be reached: %s", error
            )
            self._lost.set()
        self._task = asyncio.create_task(self._keep())

    def close(self) -> None:
        """Close the connection and stop reconnecting. Calls under way fail with TierClosedError."""
        self._reason = TierClosedError("the host tier is closed")
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close(self._reason)

    async def wait_closed(self) -> None:
        """Wait until the background task and the connection have ended, and unused memory is unmapped."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            await self._connection.wait_closed()
        await asyncio.gather(*(mapping.wait_closed() for mapping in self._mappings))

    async def _keep(self) -> None:
        while True:
            await self._lost.wait()
            pause = FIRST_PAUSE_S
            while self._connection is None:
                try:
                    await self._dial()
                    break
                except TierUnavailableError:
                    pass
                except Exception as error:  # noqa: BLE001 - no free thread or memory now; the next attempt may have it
                    logger.report("dial", "%s: cannot connect: %r", self._dialer.where, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)

    async def _dial(self) -> None:
        connection = await self._dialer.dial(self._ended)
        if not connection.usable:
            raise TierUnavailableError(f"{self._dialer.where}: the connection was lost during the handshake")
        self._lost.clear()
        self._connection = connection
        self._first = connection.figures.evictions
        self.connected.set()

    def _ended(self, connection: Connection) -> None:
        self._mappings = [mapping for mapping in self._mappings if not mapping.closed]
        self._mappings.append(connection.mapping)
        if connection is not self._connection:
            return  # it was never in use
        self._evictions += connection.figures.evictions - self._first
        self._connection = None
        self.connected.clear()
        self._lost.set()
        if not isinstance(self._reason, TierClosedError):
            logger.report(
                "lost",
                "%s: the connection was lost; the host tier misses every chunk until it is restored",
                connection.where,
            )
