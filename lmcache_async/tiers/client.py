"""Base class for connections of the bundled tiers to their servers, and deadlines for their calls."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import cast

from lmcache_async.errors import TierError, TierUnavailableError

CLOSE_S = 1.0
"""Longest wait for `connection_lost` after an abort, in seconds."""


@contextlib.asynccontextmanager
async def deadline(seconds: float, where: str, what: str, option: str) -> AsyncIterator[None]:
    """Raise TierUnavailableError with the name of `option` if the block takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():  # it is an error of the network
            raise
        raise TierUnavailableError(f"{where}: no {what} within {option} of {seconds} s") from error


class ClientConnection(asyncio.BaseProtocol, ABC):
    """Base class of the tiers' protocols: a connection to a server that is not reopened after it has ended.

    Args:
        where: The server, for messages.

    Attributes:
        gone: Set when the connection has ended and no socket is open.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.gone = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._error: TierError | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and self._error is None

    def check(self) -> asyncio.Transport:
        """Return the transport. Raise the error of the connection if it has ended."""
        if self._error is not None:
            raise self._problem()
        assert self._transport is not None  # connected
        return self._transport

    def abort(self, error: TierError | None = None) -> None:
        """Close at once. Calls in progress and later calls fail with the first error of the connection."""
        if self._error is None:
            error = error or TierUnavailableError(f"{self.where}: the connection was aborted")
            self._error = type(error)(str(error))  # without a traceback, which keeps memory alive
        if self._transport is not None:
            self._transport.abort()
        self._fail_calls()

    def discard(self) -> None:
        """Close a connection that was never established. uvloop does not call `connection_lost` for these."""
        self.abort()
        self.gone.set()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed, at most `CLOSE_S`. Call `abort` first."""
        # Not `wait_for`, which may lose a cancellation before Python 3.12.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.gone.clear()
        if self._error is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            error.__traceback__ = None  # its frames refer to the memory that was read or written
        self._lose(f"the connection was lost{f': {error}' if error else ''}")
        self.gone.set()

    def _lose(self, why: str) -> None:
        self.abort(TierUnavailableError(f"{self.where}: {why}"))

    @abstractmethod
    def _fail_calls(self) -> None:
        """Fail the calls in progress, each with a new error from `_problem()`."""

    def _problem(self) -> TierError:
        """Return a copy of the error, one for each waiter: a shared error would collect the tracebacks of all waiters."""
        assert self._error is not None
        return type(self._error)(str(self._error))
