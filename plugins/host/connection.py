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
from typing import NamedTuple

from lmcache_async.daemon.address import check_directory, default_socket, peer_of, readable
from lmcache_async.daemon.messages import (
    MAX_ITEMS,
    NUMBER,
    PROTOCOL,
    WELCOME_BYTES,
    Figures,
    FrameParser,
    Hello,
    Op,
    ProtocolError,
    Refusal,
    frame,
    pack,
    pack_hello,
    unpack_figures,
    unpack_welcome,
)
from lmcache_async.errors import ConfigError, TierClosedError, TierError, TierUnavailableError
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.region import Region
from lmcache_async.plugins.host.config import HostConfig
from lmcache_async.plugins.host.mapping import Mapping
from lmcache_async.tiers.client import ClientConnection, deadline

logger = LimitedLogger(logging.getLogger(__name__))

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MAX_UNANSWERED = 256
"""Maximum number of unanswered requests. Further requests fail, except commits."""
MAX_UNANSWERED_BYTES = 16 << 20
_TRANSFERS = frozenset({Op.LEASE, Op.RESERVE, Op.COMMIT})
_MSG_CMSG_CLOEXEC = 0x40000000


class _Request(NamedTuple):
    op: Op
    nbytes: int
    answer: asyncio.Future[bytes]
    on_late_answer: Callable[[bytes], None] | None


class Connection(ClientConnection, asyncio.Protocol):
    """A connection to one daemon.

    Attributes:
        figures: Figures of the tenant in the last answer.
    """

    def __init__(self, where: str, config: HostConfig, region: Region, socket_copy: socket.socket) -> None:
        super().__init__(where)
        self._config = config
        self.mapping = Mapping(region, socket_copy, self.release_leases)
        self.figures = Figures()
        self._parser = FrameParser()
        self._requests: deque[_Request] = deque()
        self._unanswered_bytes = 0

    async def ask(
        self,
        op: Op,
        *parts: bytes,
        option: str | None = None,
        on_late_answer: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Send a request and return its answer.

        Args:
            option: Name of the option that is the timeout; by default the one for the operation.
            on_late_answer: Called with an answer that arrives after a cancellation or timeout.

        Raises:
            TierUnavailableError: The connection has ended or ends, or there is no answer in time.
        """
        transport = self.check()
        nbytes = sum(map(len, parts))
        behind = len(self._requests) >= MAX_UNANSWERED
        behind |= self._unanswered_bytes + nbytes > MAX_UNANSWERED_BYTES
        if behind and op is not Op.COMMIT:  # commits end reservations, whose number is limited
            raise TierUnavailableError(
                f"{self.where}: {len(self._requests)} requests are unanswered, the limit"
            )
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(op, nbytes, answer, on_late_answer))
        self._unanswered_bytes += nbytes
        transport.write(frame(op, *parts))
        option = option or ("transfer_timeout_s" if op in _TRANSFERS else "lookup_timeout_s")
        try:
            async with deadline(getattr(self._config, option), self.where, f"answer to {op.name}", option):
                return await answer
        except (TierUnavailableError, asyncio.CancelledError):
            # The answer may have come in the same iteration of the loop; a later one finds the future cancelled.
            if not answer.cancelled() and answer.exception() is None and on_late_answer is not None:
                on_late_answer(answer.result())
            raise

    def release_leases(self, leases: list[int]) -> None:
        """Release leases and reservations. The end of the connection releases them too."""
        if self._transport is None or not self.usable:
            return
        for start in range(0, len(leases), MAX_ITEMS):
            self._transport.write(frame(Op.RELEASE, pack(NUMBER, zip(leases[start : start + MAX_ITEMS]))))

    def fail(self, error: Exception) -> TierError:
        """Close the connection after a protocol error, and return the error to raise."""
        self._lose(str(error))
        return self._problem()

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        try:
            while (message := self._parser.take()) is not None:
                self._answered(*message)
        except ProtocolError as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.mapping.end()

    def _fail_calls(self) -> None:
        while self._requests:
            answer = self._requests.popleft().answer
            if not answer.done():
                answer.set_exception(self._problem())

    def _answered(self, op: Op, body: bytes) -> None:
        if not self._requests or self._requests[0].op is not op:
            raise ProtocolError(f"the answer to {op.name} does not match a request")
        self.figures, answer = unpack_figures(body)
        request = self._requests.popleft()
        self._unanswered_bytes -= request.nbytes
        if not request.answer.done():
            request.answer.set_result(answer)
        elif request.on_late_answer is not None:
            request.on_late_answer(answer)


class Reconnector:
    """Keeps one connection to the daemon open and reconnects after it is lost."""

    def __init__(self, config: HostConfig, *, pin: bool, pin_device: int | None) -> None:
        self._config = config
        self._path = config.socket or default_socket()
        self._where = f"daemon at {self._path}"
        self._pin = pin
        self._pin_device = pin_device
        self._connection: Connection | None = None  # the last one, which may have ended
        self._reason: TierError = TierUnavailableError(f"{self._where}: not connected")  # if it is not usable
        self._task: asyncio.Task[None] | None = None
        self._mappings: list[Mapping] = []  # that are not closed yet
        self._evictions = 0  # in addition to those in the figures of the connection

    @property
    def connection(self) -> Connection:
        """The current connection. If there is none, raise the error of the last attempt to connect."""
        connection = self._connection
        if connection is None or not connection.usable:
            raise type(self._reason)(str(self._reason))
        return connection

    @property
    def figures(self) -> Figures | None:
        """Figures in the last answer; None without a connection."""
        return self._connection.figures if self._connection and self._connection.usable else None

    @property
    def evictions(self) -> int:
        """Evictions of the tenant while this process was connected."""
        return self._evictions + (self._connection.figures.evictions if self._connection else 0)

    async def open(self) -> None:
        """Connect. If the daemon cannot be reached, keep trying in the background."""
        try:
            self._use(await self.connect())
        except TierUnavailableError as error:
            self._reason = TierUnavailableError(str(error))
            logger.report(
                "open",
                "the host tier misses every chunk until its daemon can be reached: %s; start it with lmcache-async serve,"
                " or set `socket` to the path of its socket",
                error,
            )
        self._task = asyncio.create_task(self._keep_connected())

    def close(self) -> None:
        """Close the connection and stop reconnecting. Calls under way fail with TierClosedError."""
        self._reason = TierClosedError("the host tier is closed")
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.abort(self._reason)

    async def wait_closed(self) -> None:
        """Wait until the background task and the connection have ended, and unused memory is unmapped."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            await self._connection.wait_closed()
        await asyncio.gather(*(mapping.wait_closed() for mapping in self._mappings))

    async def _keep_connected(self) -> None:
        while True:
            pause = FIRST_PAUSE_S
            while self._connection is None or self._connection.gone.is_set():
                try:
                    self._use(await self.connect())
                except Exception as error:  # noqa: BLE001 - no free thread or memory now; the next attempt may have it
                    text = str(error)
                    if not isinstance(error, TierUnavailableError):
                        text = f"{self._where}: cannot connect: {error!r}"
                        logger.report("dial", "%s", text)
                    self._reason = TierUnavailableError(text)  # without a traceback
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_PAUSE_S)
            await self._connection.gone.wait()
            logger.report(
                "lost",
                "%s: the connection was lost; the host tier misses every chunk until it is restored",
                self._where,
            )

    def _use(self, connection: Connection) -> None:
        self._evictions = self.evictions - connection.figures.evictions
        self._connection = connection
        self._reason = TierUnavailableError(f"{self._where}: the connection was lost")

    async def connect(self) -> Connection:
        """Connect and wait for a first answer. If the call is cancelled, no connection is left open.

        Raises:
            TierUnavailableError: The daemon cannot be reached, is not ready, runs as another user, or breaks
                the protocol.
        """
        seconds = self._config.connect_timeout_s
        try:
            check_directory(self._path, make=False)
            async with deadline(seconds, self._where, "connection", "connect_timeout_s"):
                return await self._connect()
        except (OSError, ProtocolError, ConfigError) as error:
            raise TierUnavailableError(f"{self._where}: cannot connect: {error}") from error

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(connected.close)
            try:
                # Not loop.sock_connect: it takes a refusal because of a full queue for a connection in progress.
                connected.connect(os.fspath(self._path))
            except BlockingIOError:
                raise ConnectionRefusedError(
                    "its queue of new connections is full; check whether its process is stopped or overloaded"
                ) from None
            _, user = peer_of(connected)
            if user not in self._config.trusted_users:
                expected = " or ".join(map(str, sorted(self._config.trusted_users)))
                raise PermissionError(
                    f"it runs as user {user}, expected {expected}; set daemon_uid to its user if it is trusted"
                )
            hello = Hello(PROTOCOL, self._config.tenant, self._config.max_lease_bytes or 0)
            socket_copy = connected.dup()
            undo.callback(socket_copy.close)
            try:
                await loop.sock_sendall(connected, pack_hello(hello))
                await readable(connected)
                region = self._receive(connected)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise ProtocolError(
                    "it closed the connection without an answer; see its log, and check whether its allow_uids contains"
                    f" user {os.geteuid()}"
                ) from None
            connection = Connection(self._where, self._config, region, socket_copy)
            undo.callback(connection.mapping.end)
            self._mappings = [one for one in self._mappings if not one.closed]
            self._mappings.append(connection.mapping)
            await loop.create_unix_connection(lambda: connection, sock=connected)
            undo.pop_all()
        try:
            await connection.ask(Op.CONTAINS, option="connect_timeout_s")  # waits for the first figures
            connection.check()
        except BaseException:
            connection.abort()
            await connection.wait_closed()
            raise
        return connection

    def _receive(self, connected: socket.socket) -> Region:
        """Receive the daemon's answer and map its memory."""
        message, descriptors, _, _ = socket.recv_fds(connected, WELCOME_BYTES, 4, _MSG_CMSG_CLOEXEC)
        try:
            if not message:
                raise EOFError
            if len(message) != WELCOME_BYTES:
                raise ProtocolError(f"its answer has {len(message)} bytes, expected {WELCOME_BYTES}")
            welcome = unpack_welcome(message)
            if welcome.refusal is Refusal.TOO_MUCH:
                raise ProtocolError("it has reached its limit of clients")
            if welcome.refusal is not Refusal.NONE:
                raise ProtocolError(
                    f"its protocol version is {welcome.protocol}, expected {PROTOCOL}: run the same version of"
                    " lmcache-async in both"
                )
            if len(descriptors) != 1:
                raise ProtocolError(f"its answer has {len(descriptors)} file descriptors, expected one")
            if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("its memory is not sealed against shrinking")
            file_bytes = os.fstat(descriptors[0]).st_size
            if not 0 < welcome.nbytes <= file_bytes:
                raise ProtocolError(
                    f"it says that its memory has {welcome.nbytes} bytes, the file has {file_bytes}"
                )
            return Region(
                welcome.nbytes,
                grain_bytes=welcome.nbytes,  # a record at any offset must be within one pinned range
                pin=self._pin,
                pin_device=self._pin_device,
                huge_pages=True,
                prefault=self._config.prefault,
                fd=descriptors[0],
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
