"""Connections to a server: connecting, commands and replies, records without a copy, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.valkey.protocol import (
    ErrorReply,
    ProtocolError,
    Reader,
    Record,
    Replies,
    Reply,
    encode,
)

if TYPE_CHECKING:
    from lmcache_async.config.values import Endpoint
    from lmcache_async.plugins.valkey.config import Credentials

SLICE_BYTES = 1 << 20
"""Bytes per transport write. asyncio's transport copies the part that the socket does not accept at once."""
TLS_SLICE_BYTES = 256 << 10
CLOSE_S = 1.0
"""Longest wait for `connection_lost` after an abort, in seconds."""


@contextlib.asynccontextmanager
async def deadline(seconds: float, where: str, what: str, option: str) -> AsyncIterator[None]:
    """Raise TierUnavailableError with the name of `option` if the block takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TierUnavailableError(f"{where}: no {what} within {option} of {seconds} s") from error


class Connection(asyncio.BufferedProtocol):
    """A connection, whose commands are answered in the order in which they were sent.

    While a record is transferred no other command may be under way. A command that fails or is cancelled
    halfway leaves the connection out of step: `idle` stays False, and the connection must be aborted.

    Args:
        where: Name of the server in messages.
        copies: Whether sent bytes are copied first. TLS transports keep references to them.
    """

    def __init__(self, where: str, *, copies: bool = False) -> None:
        self.where = where
        self._slice_bytes = TLS_SLICE_BYTES if copies else SLICE_BYTES
        self._copies = copies
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._error: TierError | None = None
        self._writable: asyncio.Future[None] | None = None
        self._gone = asyncio.get_running_loop().create_future()

    @property
    def usable(self) -> bool:
        return self._transport is not None and self._error is None

    @property
    def idle(self) -> bool:
        """Whether no command is under way, so that any caller can send the next one."""
        return self.usable and self._reader.idle and self._writable is None

    @property
    def closed(self) -> bool:
        """Whether it was aborted and its socket is closed."""
        return self._error is not None and (self._transport is None or self._gone.done())

    async def call(self, message: bytes, count: int) -> list[Reply]:
        """Send commands and wait for their `count` short replies.

        If the call is cancelled, the replies are still received and dropped; the connection stays in step.
        """
        replies = Replies(count)
        self._send(message, replies)
        return await replies.done

    async def fetch(
        self,
        message: bytes,
        allocate: Callable[[int], Awaitable[Buffer]],
        *,
        before: int,
        timeout_s: float,
    ) -> Buffer | ErrorReply | None:
        """Send a command whose reply is one record, and receive the record into a buffer from `allocate`.

        Args:
            message: The command, after `before` other commands.
            allocate: Called once the length is known; its time does not count.
            before: Number of other commands, whose replies are ignored.
            timeout_s: Longest time until the record is received, in seconds.

        Returns:
            The buffer, leased to the caller; None for a miss; or the server's error reply.
        """
        record = Record()
        self._send(message, *([Replies(before)] if before else []), record)
        async with deadline(timeout_s, self.where, "answer", "transfer_timeout_s"):
            length = await record.length
        if not isinstance(length, int):
            return length
        buffer = await allocate(length)
        try:
            what = f"complete record of {length} bytes"
            async with deadline(timeout_s, self.where, what, "transfer_timeout_s"):
                self._receive_into(buffer.view)
                await record.done
        except BaseException:
            self.abort()  # before the lease ends, so that nothing more is received into it
            buffer.release()
            raise
        return buffer

    async def store(
        self, head: bytes, content: memoryview, tail: bytes, *, before: int, timeout_s: float
    ) -> Reply:
        """Send a command with a long argument and return the reply.

        The memory must not change during the call. After the call, also after a cancellation, the memory is
        not read any more.
        """
        replies = Replies(before + 1)
        self._send(head, replies)
        try:
            what = f"reply to the write of {len(content)} bytes"
            async with deadline(timeout_s, self.where, what, "transfer_timeout_s"):
                for start in range(0, len(content), self._slice_bytes):
                    while self._writable is not None:
                        await self._writable
                    if replies.done.done():
                        break  # the server refused the command before it was complete
                    self._send_slice(content, start)
                else:
                    self._send(tail)
                    return (await replies.done)[-1]
                reply = (await replies.done)[-1]
                self.abort()
                return reply
        except BaseException:
            self.abort()
            raise

    def abort(self, error: TierError | None = None) -> None:
        """Close at once. Waiters get the first error of the connection."""
        if self._error is None:
            self._error = self._problem() if error is None else type(error)(str(error))
        if self._transport is not None:
            self._transport.abort()
        self._release_waiters()

    def discard(self) -> None:
        """Close a connection that was never established. uvloop does not call `connection_lost` for these."""
        self.abort()
        self._note_gone()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed. Call `abort` first."""
        if not self.closed:
            await asyncio.wait([self._gone], timeout=CLOSE_S)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # TLS transports pause at the high-water mark itself, not above it: at 0 they would never resume.
        self._transport.set_write_buffer_limits(high=TLS_SLICE_BYTES if self._copies else 0)
        if self._error is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._error is not None:
            return
        try:
            self._reader.received(nbytes)
        except ProtocolError as error:
            self._lose(str(error), error)
            return
        if self._reader.paused and self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            error.__traceback__ = None  # its frames refer to the memory that was read or written
        self._lose(f"the connection was lost{f': {error}' if error else ''}", error)
        self._release_waiters()
        self._note_gone()

    def _send(self, message: bytes, *expected: Replies | Record) -> None:
        self._check_usable()
        assert self._transport is not None  # connected
        for one in expected:
            self._reader.expect(one)
        self._transport.write(message)

    def _send_slice(self, content: memoryview, start: int) -> None:
        """Send one slice. It is local to this frame, because tracebacks would keep its slab alive."""
        self._check_usable()
        assert self._transport is not None  # connected
        piece = content[start : start + self._slice_bytes]
        self._transport.write(bytes(piece) if self._copies else piece)

    def _receive_into(self, memory: memoryview) -> None:
        self._check_usable()
        assert self._transport is not None  # connected
        try:
            self._reader.take_record(memory)
        except ProtocolError as error:
            self._lose(str(error), error)
            raise TierUnavailableError(f"{self.where}: {error}") from error
        self._transport.resume_reading()

    def _note_gone(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._problem()

    def _problem(self) -> TierError:
        """Return a new error with the reason why the connection is unusable."""
        known = self._error or TierUnavailableError(f"{self.where}: the connection was aborted")
        error = type(known)(str(known))
        error.__cause__ = known.__cause__
        return error

    def _lose(self, why: str, cause: Exception | None) -> None:
        if self._error is None:
            self._error = TierUnavailableError(f"{self.where}: {why}")
            self._error.__cause__ = cause
            self.abort()

    def _release_waiters(self) -> None:
        self._reader.fail(self._problem)
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None


_NAME = b"lmcache-async"
_KEEPALIVE_S = 30
"""TCP keep-alive: idle seconds before the first probe."""


class RefusedCredentialsError(TierError):
    """The server rejects the user or the password."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Settings of new connections.

    Attributes:
        credentials: User and password.
        tls: None for connections without encryption.
        timeout_s: Longest time to connect, in seconds.
        database: Number of the database.
        master_only: Whether a server that is not a master is refused.
        kind: Name of the server in messages.
    """

    credentials: Credentials
    tls: ssl.SSLContext | None
    timeout_s: float
    database: int = 0
    master_only: bool = False
    kind: str = "valkey"

    async def dial(self, endpoint: Endpoint, known: set[Connection]) -> Connection:
        """Connect and authenticate. No connection is left open if the call is cancelled.

        Args:
            endpoint: The server.
            known: The connection is added to this set at once, so that the owner can close it.

        Raises:
            TierUnavailableError: The server cannot be reached, or is not ready.
            RefusedCredentialsError: The server rejects the user or the password.
            TierError: The certificate is invalid, or the server refuses the connection.
        """
        where = f"{self.kind} at {endpoint}"
        connection = Connection(where, copies=self.tls is not None)
        known.difference_update([one for one in known if one.closed])
        known.add(connection)
        try:
            async with deadline(self.timeout_s, where, "connection", "connect_timeout_s"):
                try:
                    await self._connect(connection, endpoint)
                except BaseException:
                    connection.discard()
                    raise
                await self._greet(connection)
        except BaseException as error:
            connection.abort()
            if isinstance(error, OSError | UnicodeError):
                raise connect_error(where, error) from error
            raise
        return connection

    async def _connect(self, connection: Connection, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        host = endpoint.host if self.tls is not None and not endpoint.path else None
        if endpoint.path:
            await loop.create_unix_connection(lambda: connection, endpoint.path)
            return
        transport, _ = await loop.create_connection(
            lambda: connection, endpoint.host, endpoint.port, ssl=self.tls, server_hostname=host
        )
        if (tcp := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # an old kernel; the deadlines apply anyway
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)

    async def _greet(self, connection: Connection) -> None:
        """Authenticate, set the name, select the database and check the role in one message.

        Users with few permissions may be refused the name and the role; these refusals are ignored.
        """
        commands = {"auth": self.credentials.command, "name": (b"CLIENT", b"SETNAME", _NAME)}
        if self.database:
            commands["database"] = (b"SELECT", b"%d" % self.database)
        if self.master_only:
            commands["role"] = (b"ROLE",)
        asked = {name: command for name, command in commands.items() if command}
        replies = await connection.call(b"".join(encode(*command) for command in asked.values()), len(asked))
        for name, reply in zip(asked, replies, strict=True):
            self._check(connection.where, name, reply)

    def _check(self, where: str, name: str, reply: Reply) -> None:
        if isinstance(reply, ErrorReply):
            if name == "auth" or reply.code in _CREDENTIAL_CODES:
                # For AUTH only the code: a server that does not know the command repeats its arguments.
                known = ErrorReply(reply.code, reply.code if name == "auth" else reply.text)
                if reply.code in {"LOADING", "BUSY"} or "max number of clients" in reply.text:
                    raise TierUnavailableError(f"{where} is not ready: {reply.code}")
                raise RefusedCredentialsError(str(refusal(where, known)))
            if reply.code not in {"NOPERM", "ERR"} or name == "database" or "max number" in reply.text:
                raise refusal(where, reply)
        elif name == "role" and isinstance(reply, list) and reply and reply[0] != b"master":
            raise TierUnavailableError(
                f"{where} is not a master any more; the master is requested from Sentinel again"
            )


_LATER = frozenset(
    {
        *("LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "READONLY", "MISCONF", "NOREPLICAS"),
        *("ASK", "UNBLOCKED", "FAILOVER", "NOGOODSLAVE"),
    }
)
"""Error codes of temporary conditions."""

_CURES = {
    "OOM": "; raise its maxmemory, or set maxmemory-policy to allkeys-lru or allkeys-lfu",
    "NOAUTH": "; set username and password_file, or password_variable",
    "WRONGPASS": "; check username and password_file, or password_variable",
    "NOPERM": "; allow the user GET, SET, EXISTS, UNLINK and SCAN on the keys of key_prefix",
    "MOVED": "; it is a node of a cluster: set mode to cluster",
    "MISCONF": "; it rejects writes because it cannot save to its disk: see its log",
    "READONLY": "; it is a replica: use the URL of the master, or set mode to sentinel",
}
_CREDENTIAL_CODES = frozenset({"NOAUTH", "WRONGPASS"})


def refusal(where: str, reply: ErrorReply) -> TierError:
    """Return the error for an error reply of the server."""
    text = reply.text if len(reply.text) <= 200 else f"{reply.text[:197]}..."
    message = f"{where} answered {text!r}{_CURES.get(reply.code, '')}"
    if reply.code == "OOM":
        return TierFullError(message)
    if reply.code in _LATER or "max number of clients" in reply.text:
        return TierUnavailableError(message)
    return TierError(message)


def connect_error(where: str, error: OSError | UnicodeError) -> TierError:
    """Return the error for a failed connect."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TierError(
            f"{where}: its certificate is rejected: {error.verify_message};"
            " check tls_ca_file and tls_check_hostname"
        )
    if isinstance(error, ssl.SSLError):
        return TierUnavailableError(
            f"{where}: TLS failed: {error.reason or error}; check that its port uses TLS, and tls_cert_file if it"
            " requires a client certificate"
        )
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TierUnavailableError(f"{where}: cannot connect: {text}; check that it is running, and url")
