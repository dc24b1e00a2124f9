"""Connections to the daemon: handshake, mapping of its memory, requests and answers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from lmcache_async.daemon.address import check_directory, default_socket, peer_of
from lmcache_async.daemon.messages import (
    MAX_ITEMS,
    PROTOCOL,
    WELCOME_BYTES,
    Figures,
    Frames,
    Hello,
    Op,
    ProtocolError,
    Refusal,
    Welcome,
    frame,
    pack_hello,
    pack_numbers,
    unpack_figures,
    unpack_welcome,
)
from lmcache_async.errors import ConfigError, TierClosedError, TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.region import Region
from lmcache_async.plugins.host.config import HostConfig
from lmcache_async.plugins.host.mapping import Mapping

logger = LimitedLogger(logging.getLogger(__name__))

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MAX_UNANSWERED = 256
"""Maximum number of unanswered requests. Further requests fail, except commits."""
MAX_UNANSWERED_BYTES = 16 << 20
CLOSE_S = 1.0
"""Longest wait for `connection_lost` after an abort, in seconds."""
_MSG_CMSG_CLOEXEC = 0x40000000


@dataclass(eq=False, slots=True)
class _Request:
    op: Op
    nbytes: int
    answer: asyncio.Future[bytes]
    unwanted: Callable[[bytes], None] | None


class Connection(asyncio.Protocol):
    """A client connection to one daemon. It is not reopened after its end.

    Args:
        ended: Called once, after the connection has ended.

    Attributes:
        figures: Figures of the tenant in the last answer.
        gone: Done when the connection has ended.
    """

    def __init__(self, where: str, mapping: Mapping, ended: Callable[[Connection], None]) -> None:
        self.where = where
        self.mapping = mapping
        self.figures = Figures()
        self.gone = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._frames = Frames()
        self._requests: deque[_Request] = deque()
        self._unanswered_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._error: TierError | None = None

    @property
    def usable(self) -> bool:
        return self._error is None

    def check(self) -> None:
        """Raise the error of the connection if it has ended."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def ask(
        self,
        op: Op,
        *parts: bytes,
        timeout_s: float,
        unwanted: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Send a request and return its answer.

        If the call is cancelled or times out, the answer is still received, and passed to `unwanted`.

        Args:
            unwanted: Called with an answer that arrives after a cancellation or timeout.

        Raises:
            TierUnavailableError: The connection has ended or ends, or there is no answer in time.
        """
        request = self._send(op, parts, unwanted)
        try:
            async with asyncio.timeout(timeout_s):
                return await request.answer
        except TimeoutError as error:
            _forget(request)
            raise TierUnavailableError(
                f"{self.where}: no answer to {op.name} within {timeout_s} s"
            ) from error
        except asyncio.CancelledError:
            _forget(request)
            raise

    def give_back(self, leases: list[int]) -> None:
        """Release leases and reservations. The end of the connection releases them too."""
        if self._transport is None or not self.usable:
            return
        for start in range(0, len(leases), MAX_ITEMS):
            self._transport.write(frame(Op.RELEASE, pack_numbers(leases[start : start + MAX_ITEMS])))

    def fail(self, error: Exception) -> TierError:
        """Close the connection after a protocol error, and return the error to raise."""
        failure = TierUnavailableError(f"{self.where}: {error}")
        self.close(failure)
        return failure

    def close(self, error: TierError) -> None:
        """Close the connection. Pending and later calls fail with `error`."""
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed, at most `CLOSE_S`. Call `close` first."""
        await asyncio.wait([self.gone], timeout=CLOSE_S)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.mapping.begin(self.give_back)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while (message := self._frames.take()) is not None:
                self._answered(*message)
        except ProtocolError as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._error is None:
            reason = f": {error}" if error else ""
            self._error = TierUnavailableError(f"{self.where}: the connection was lost{reason}")
        requests, self._requests = self._requests, deque()
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(self._error.with_traceback(None))
        self.mapping.end()
        self.gone.set_result(None)
        self._ended(self)

    def _send(self, op: Op, parts: tuple[bytes, ...], unwanted: Callable[[bytes], None] | None) -> _Request:
        self.check()
        assert self._transport is not None
        nbytes = sum(map(len, parts))
        behind = len(self._requests) >= MAX_UNANSWERED
        behind |= self._unanswered_bytes + nbytes > MAX_UNANSWERED_BYTES
        if behind and op is not Op.COMMIT:  # commits end reservations, whose number is limited
            raise TierUnavailableError(
                f"{self.where}: {len(self._requests)} requests are unanswered, the limit"
            )
        request = _Request(op, nbytes, asyncio.get_running_loop().create_future(), unwanted)
        self._requests.append(request)
        self._unanswered_bytes += nbytes
        self._transport.write(frame(op, *parts))
        return request

    def _answered(self, op: Op, body: bytes) -> None:
        if not self._requests or self._requests[0].op is not op:
            raise ProtocolError(f"the answer to {op.name} does not match a request")
        self.figures, answer = unpack_figures(body)
        request = self._requests.popleft()
        self._unanswered_bytes -= request.nbytes
        if not request.answer.done():
            request.answer.set_result(answer)
        elif request.unwanted is not None:
            request.unwanted(answer)


def _forget(request: _Request) -> None:
    """Drop the waiter of a request. An answer that came in the same loop iteration goes to `unwanted`."""
    answer = request.answer
    if answer.cancelled() or not answer.done():
        answer.cancel()
    elif answer.exception() is None and request.unwanted is not None:
        request.unwanted(answer.result())


class Link:
    """Keeps one connection to the daemon open and reconnects after it is lost."""

    def __init__(self, config: HostConfig, *, pin: bool, pin_device: int | None) -> None:
        self.connected = asyncio.Event()
        self._config = config
        self._path = config.socket or default_socket()
        self._where = f"daemon at {self._path}"
        self._pin = pin
        self._pin_device = pin_device
        self._connection: Connection | None = None
        self._reason: TierError = TierUnavailableError(f"{self._where}: not connected")
        self._task: asyncio.Task[None] | None = None
        self._mappings: list[Mapping] = []  # of connections that have ended
        self._evictions = 0  # of connections that have ended
        self._first = 0  # evictions before the current connection

    @property
    def connection(self) -> Connection:
        """The current connection."""
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
            pause = FIRST_PAUSE_S
            while (connection := self._connection) is None:
                try:
                    await self._dial()
                    continue
                except TierUnavailableError:
                    pass
                except Exception as error:  # noqa: BLE001 - no free thread or memory now; the next attempt may have it
                    logger.report("dial", "%s: cannot connect: %r", self._where, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
            await asyncio.wait([connection.gone])

    async def _dial(self) -> None:
        connection = await self.connect()
        if not connection.usable:
            raise TierUnavailableError(f"{self._where}: the connection was lost during the handshake")
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
        if not isinstance(self._reason, TierClosedError):
            logger.report(
                "lost",
                "%s: the connection was lost; the host tier misses every chunk until it is restored",
                connection.where,
            )

    async def connect(self) -> Connection:
        """Connect and wait for a first answer. If the call is cancelled, no connection is left open.

        Raises:
            TierUnavailableError: The daemon cannot be reached, is not ready, runs as another user, or breaks
                the protocol.
        """
        try:
            check_directory(self._path, make=False)
            async with asyncio.timeout(self._config.connect_timeout_s):
                return await self._connect()
        except TimeoutError as error:
            raise TierUnavailableError(
                f"{self._where}: no connection within connect_timeout_s of {self._config.connect_timeout_s} s"
            ) from error
        except (OSError, ProtocolError, ConfigError) as error:
            raise TierUnavailableError(f"{self._where}: cannot connect: {error}") from error

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(connected.close)
            await loop.sock_connect(connected, os.fspath(self._path))
            _, user = peer_of(connected)
            if user not in self._config.trusted_users:
                expected = " or ".join(map(str, sorted(self._config.trusted_users)))
                raise PermissionError(
                    f"it runs as user {user}, expected {expected}; set daemon_uid to its user if it is trusted"
                )
            hello = Hello(PROTOCOL, self._config.tenant, self._config.max_lease_bytes or 0)
            await loop.sock_sendall(connected, pack_hello(hello))
            anchor = connected.dup()
            undo.callback(anchor.close)
            region = await self._receive(connected)
            mapping = Mapping(region, anchor)
            undo.callback(mapping.end)
            connection = Connection(self._where, mapping, self._ended)
            await loop.create_unix_connection(lambda: connection, sock=connected)
            undo.pop_all()
        try:
            await connection.ask(
                Op.CONTAINS, timeout_s=self._config.connect_timeout_s
            )  # waits for the first figures
        except BaseException:
            connection.close(TierUnavailableError(f"{self._where}: the connection attempt was abandoned"))
            await connection.wait_closed()
            raise
        return connection

    async def _receive(self, connected: socket.socket) -> Region:
        """Receive the daemon's answer and map its memory."""
        await _readable(connected)
        message, descriptors, _, _ = socket.recv_fds(connected, WELCOME_BYTES, 4, _MSG_CMSG_CLOEXEC)
        try:
            if len(message) != WELCOME_BYTES:
                raise ProtocolError(
                    "it closed the connection"
                    if not message
                    else f"its answer has {len(message)} bytes, expected {WELCOME_BYTES}"
                )
            welcome = unpack_welcome(message)
            _check(welcome)
            if len(descriptors) != 1:
                raise ProtocolError(f"its answer has {len(descriptors)} file descriptors, expected one")
            return self._map(descriptors[0], welcome.nbytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, descriptor: int, nbytes: int) -> Region:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("its memory is not sealed against shrinking")
        return Region(
            nbytes,
            grain_bytes=nbytes,  # a record at any offset must be within one pinned range
            pin=self._pin,
            pin_device=self._pin_device,
            huge_pages=True,
            prefault=self._config.prefault,
            fd=descriptor,
        )


def _check(welcome: Welcome) -> None:
    if welcome.refusal is Refusal.TOO_MUCH:
        raise ProtocolError("it has reached its limit of clients")
    if welcome.refusal is not Refusal.NONE:
        raise ProtocolError(
            f"its protocol version is {welcome.protocol}, expected {PROTOCOL}: run the same version of lmcache-async in both"
        )


async def _readable(connected: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(connected, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connected)
