"""Listening with a bound that holds: a connection counts from the moment it is accepted, TLS or not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    Make: TypeAlias = Callable[[Callable[[], None]], asyncio.BaseProtocol]

_RETRY_S = 0.1


class Gate:
    """Lets in so many connections at a time. Used on one loop, opened and closed once.

    A server of asyncio's knows of a TLS connection once its handshake is done: whoever says nothing is
    not counted. Here all count from their accept, and one too many is closed before a byte of it is read.

    Args:
        make: A connection's protocol; it calls what it is given in its `connection_lost`.
        most: Connections, those in their handshake too.
        tls: What handshakes are made with; None for none.
        handshake_timeout_s: Longest time of one.
        backlog: Connections that the kernel keeps for us.
    """

    def __init__(
        self,
        make: Make,
        *,
        most: int,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        backlog: int,
    ) -> None:
        self._make = make
        self._most = most
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._inside: set[socket.socket] = set()
        self._entering: set[asyncio.Task[asyncio.BaseTransport]] = set()
        self._logger = LimitedLogger(logging.getLogger(__name__))

    @property
    def port(self) -> int:
        """Where it listens; of a host with several addresses, at the first."""
        return int(self._listeners[0].getsockname()[1])

    async def open(self, host: str, port: int) -> None:
        """Listen at every address of the host.

        Raises:
            OSError: There is no listening there.
            UnicodeError: The host is no name.
        """
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as undo:
            for family, _, _, _, address in dict.fromkeys(found):
                with contextlib.suppress(_NoSuchAddressError):
                    self._listeners.append(undo.enter_context(_listener(family, address, self._backlog)))
            if not self._listeners:
                raise OSError(errno.EADDRNOTAVAIL, "it has no address of this machine")
            undo.pop_all()
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Listen no more, and end the handshakes under way. Connections that are made are others' to end."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for pause in self._pauses.values():
            pause.cancel()
        entering = tuple(self._entering)
        for task in entering if self._tls is not None else ():  # others are made within a turn
            task.cancel()
        await asyncio.gather(*entering, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # it has gone again
            return
        except OSError as error:  # no descriptors left; it may pass
            self._logger.report("accept", "no connection can be accepted: %s", error)
            self._loop.remove_reader(listener)
            self._pauses[listener] = self._loop.call_later(
                _RETRY_S, self._loop.add_reader, listener, self._accept, listener
            )
            return
        connection.setblocking(False)
        if len(self._inside) >= self._most:
            connection.close()
            return
        self._inside.add(connection)
        task = self._loop.create_task(self._enter(connection))
        self._entering.add(task)
        task.add_done_callback(partial(self._entered, connection))

    async def _enter(self, connection: socket.socket) -> asyncio.BaseTransport:
        transport, _ = await self._loop.connect_accepted_socket(
            partial(self._make, partial(self._inside.discard, connection)),
            connection,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._handshake_timeout_s,
        )
        return transport

    def _entered(self, connection: socket.socket, task: asyncio.Task[asyncio.BaseTransport]) -> None:
        self._entering.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is None and not task.result().is_closing():
                return
            if error is not None and not isinstance(error, OSError):  # those are the other end's doing
                self._logger.report("enter", "a connection was not made: %r", error)
        # No protocol may have been told of it, as when it is lost in its handshake.
        self._inside.discard(connection)
        if task.cancelled() or task.exception() is not None:
            connection.close()


class _NoSuchAddressError(Exception):
    """A host's name has an address that this machine has not, or a family that its kernel has not."""


def _listener(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise _NoSuchAddressError from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # the same port of IPv4 is a listener of its own
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _NoSuchAddressError from error
        raise
    return listener
