"""A server and its connections: a shared one for lookups, and a bounded number for records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from lmcache_async.errors import TierClosedError, TierError, TierUnavailableError
from lmcache_async.plugins.valkey.connection import Connection, deadline

if TYPE_CHECKING:
    from lmcache_async.config.values import Endpoint
    from lmcache_async.plugins.valkey.connection import Dialer
    from lmcache_async.plugins.valkey.protocol import Reply


class Node:
    """Connections to one server, opened on demand and reused.

    Args:
        endpoint: The server.
        dialer: Opens connections.
        connections: Most records transferred at the same time.
        lookup_timeout_s: Longest time of a `call`, in seconds.
        transfer_timeout_s: Longest wait for a connection, in seconds.
        pause_s: Seconds after a failure during which no connection is attempted.
        on_failure: Called if the server could not be reached or did not answer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dialer: Dialer,
        *,
        connections: int,
        lookup_timeout_s: float,
        transfer_timeout_s: float,
        pause_s: float = 0.0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = endpoint
        self.where = f"{dialer.kind} at {endpoint}"
        self._dialer = dialer
        self._lookup_timeout_s = lookup_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._pause_s = pause_s
        self._on_failure = on_failure
        self._shared: Connection | None = None
        self._dialing = asyncio.Lock()
        self._slots = asyncio.Semaphore(connections)
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._ended: TierError | None = None  # why there are no new connections
        self._failure: tuple[float, str] | None = None  # when, and what

    @property
    def suspended(self) -> bool:
        """Whether it failed less than `pause_s` seconds ago."""
        return self._failure is not None and self._now() < self._failure[0] + self._pause_s

    @property
    def failed(self) -> bool:
        """Whether it failed, and no connection succeeded since."""
        return self._failure is not None

    async def call(self, message: bytes, count: int) -> list[Reply]:
        """Send commands on the shared connection and return their replies.

        Raises:
            TierUnavailableError: They were not received in time. The connection is aborted.
        """
        line: Connection | None = None
        try:
            async with deadline(self._lookup_timeout_s, self.where, "answer", "lookup_timeout_s"):
                line = await self._shared_connection()
                return await line.call(message, count)
        except TierUnavailableError as error:
            if line is not None:
                line.abort(error)
            self._note(error)
            raise
        finally:
            if line is not None and self._ended is not None and line.idle:
                line.abort()

    @property
    def unused(self) -> bool:
        """Whether it has no open connection."""
        return all(connection.closed for connection in self._all)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Reserve a connection for one record. It is closed afterwards if it is out of step."""
        async with deadline(self._transfer_timeout_s, self.where, "free connection", "transfer_timeout_s"):
            await self._slots.acquire()
        connection: Connection | None = None
        try:
            connection = self._take_free() or await self._dial()
            yield connection
        except TierUnavailableError as error:
            self._note(error)
            raise
        finally:
            self._slots.release()
            if connection is not None:
                self._give_back(connection)

    def close(self) -> None:
        """Close all connections. Calls under way fail with TierClosedError."""
        self._end(TierClosedError(f"{self.where}: the tier was closed"))
        for connection in tuple(self._all):
            connection.abort(TierClosedError(f"{self.where}: the tier was closed"))

    def retire(self) -> None:
        """Open no new connections, and close those in use after their use."""
        self._end(TierUnavailableError(f"{self.where}: it is not a master any more"))

    def _end(self, why: TierError) -> None:
        self._ended = why
        for connection in [*self._free, *([self._shared] if self._shared and self._shared.idle else [])]:
            connection.abort()
        self._free.clear()

    async def wait_closed(self) -> None:
        """Wait until the sockets are closed, after `close`."""
        for connection in tuple(self._all):
            await connection.wait_closed()

    async def _shared_connection(self) -> Connection:
        async with self._dialing:
            if self._shared is None or not self._shared.usable:
                self._shared = await self._dial()
            return self._shared

    def _take_free(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.idle:
                return connection
            connection.abort()
        return None

    def _give_back(self, connection: Connection) -> None:
        if connection.idle and self._ended is None:
            self._free.append(connection)
        else:
            connection.abort()

    async def _dial(self) -> Connection:
        if self.suspended and self._failure is not None:
            raise TierUnavailableError(
                f"{self._failure[1]}; it is contacted again after node_pause_s of {self._pause_s} s"
            )
        self._check_open()
        connection = await self._dialer.dial(self.endpoint, self._all)
        self._failure = None
        try:
            self._check_open()
        except TierError:
            connection.abort()
            raise
        return connection

    def _check_open(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))

    def _note(self, error: TierError) -> None:
        if not self.suspended:
            self._failure = (self._now(), str(error))
        self._on_failure()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
