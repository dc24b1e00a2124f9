"""Connections to a server: dialling, commands and replies, records straight from and into the arena, and errors."""

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
    from lmcache_async.config.endpoint import Endpoint
    from lmcache_async.plugins.valkey.config import Credentials

SLICE_BYTES = 1 << 20
"""What a transport is given at a time: asyncio's copies what the socket does not take at once."""
TLS_SLICE_BYTES = 256 << 10
CLOSE_S = 1.0
"""Longest wait for the loop to say that a socket is closed."""


@contextlib.asynccontextmanager
async def deadline(seconds: float, where: str, what: str, option: str) -> AsyncIterator[None]:
    """Raises TierUnavailableError when the block takes longer than the option says."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TierUnavailableError(f"{where}: no {what} within {option} of {seconds} s") from error


class Connection(asyncio.BufferedProtocol):
    """Commands are answered in the order in which they were sent.

    Records move by themselves: only one command may be under way then. A command that fails or is
    cancelled half way leaves the connection out of step: `idle` stays False, and it is to be aborted.

    Args:
        where: The server, for messages.
        copies: Whether what is sent is copied first: TLS transports keep what they are given for as long
            as they please.
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
        """Whether the next command may be anybody's."""
        return self.usable and self._reader.idle and self._writable is None

    @property
    def closed(self) -> bool:
        """Whether it was given up, and its socket is closed."""
        return self._error is not None and (self._transport is None or self._gone.done())

    async def call(self, message: bytes, count: int) -> list[Reply]:
        """Send commands and wait for all their short replies, of which there are `count`.

        Cancelled, the replies are still taken, for nobody; the connection stays in step.
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
        """Send a command that is answered by one record, and receive that into a buffer of `allocate`'s.

        Args:
            message: The command, with others before it.
            allocate: Asked once the length is known; its time is not counted.
            before: How many others, whose replies are not looked at.
            timeout_s: Longest time for the record to come, in seconds.

        Returns:
            The buffer, leased to the caller; None for a miss; or the server's refusal.
        """
        record = Record()
        self._send(message, *([Replies(before)] if before else []), record)
        async with deadline(timeout_s, self.where, "answer", "transfer_timeout_s"):
            length = await record.length
        if not isinstance(length, int):
            return length
        buffer = await allocate(length)
        try:
            what = f"whole record of {length} bytes"
            async with deadline(timeout_s, self.where, what, "transfer_timeout_s"):
                self._receive_into(buffer.view)
                await record.done
        except BaseException:
            self.abort()  # before the lease ends: nothing more is to come into it
            buffer.release()
            raise
        return buffer

    async def store(
        self, head: bytes, content: memoryview, tail: bytes, *, before: int, timeout_s: float
    ) -> Reply:
        """Send a command with a long argument from memory that must not change meanwhile; the reply.

        Once it has ended, also by cancellation, the memory is not read any more.
        """
        replies = Replies(before + 1)
        self._send(head, replies)
        try:
            what = f"end of storing {len(content)} bytes"
            async with deadline(timeout_s, self.where, what, "transfer_timeout_s"):
                for start in range(0, len(content), self._slice_bytes):
                    while self._writable is not None:
                        await self._writable
                    if replies.done.done():
                        break  # refused before all of it was there
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
        """Close at once, without waiting for anything; who waits gets the error, or the one before it."""
        if self._error is None:
            self._error = self._problem() if error is None else type(error)(str(error))
        if self._transport is not None:
            self._transport.abort()
        self._release_waiters()

    def discard(self) -> None:
        """Close what was never connected: the loop does so, and uvloop's does not tell us when."""
        self.abort()
        self._note_gone()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed; after `abort`, that is in a moment."""
        if not self.closed:
            await asyncio.wait([self._gone], timeout=CLOSE_S)

    # What the transport tells us.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # TLS transports pause at the mark itself, not above it: at 0 they would never resume.
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
            error.__traceback__ = None  # its frames hold the memory that was read or written
        self._lose(f"the connection is lost{f': {error}' if error else ''}", error)
        self._release_waiters()
        self._note_gone()

    def _send(self, message: bytes, *expected: Replies | Record) -> None:
        self._check_usable()
        assert self._transport is not None  # connected
        for one in expected:
            self._reader.expect(one)
        self._transport.write(message)

    def _send_slice(self, content: memoryview, start: int) -> None:
        """A slice is known here alone: in the frames of an error it would keep its slab."""
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
        """Why it is not usable, as an error of the caller's own."""
        known = self._error or TierUnavailableError(f"{self.where}: the connection was given up")
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
"""Seconds of silence after which the kernel looks whether the other end is still there."""


class RefusedCredentialsError(TierError):
    """The server does not know the user and the password."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Makes connections of one kind.

    Attributes:
        credentials: For the server.
        tls: None where connections are not encrypted.
        timeout_s: Longest time for one, in seconds.
        database: Its number.
        master_only: Whether a server that says that it is no master is refused.
        kind: Name of the server in messages.
    """

    credentials: Credentials
    tls: ssl.SSLContext | None
    timeout_s: float
    database: int = 0
    master_only: bool = False
    kind: str = "valkey"

    async def dial(self, endpoint: Endpoint, known: set[Connection]) -> Connection:
        """A connection that is ready for use. Cancelled, none is left.

        Args:
            endpoint: The server.
            known: It is put there at once, for who closes it or waits until it is closed.

        Raises:
            TierUnavailableError: The server cannot be reached now, or is not ready.
            RefusedCredentialsError: It refuses user and password.
            TierError: Its certificate is not accepted, or it refuses us.
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
                raise no_connection(where, error) from error
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
            with contextlib.suppress(OSError):  # an old kernel; the deadlines hold all the same
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)

    async def _greet(self, connection: Connection) -> None:
        """All in one message; the server may refuse the name and the role to a user with few rights."""
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
            if name == "auth" or reply.code in CREDENTIAL_CODES:
                # Of AUTH only the code: a server that does not know the command repeats its arguments.
                known = ErrorReply(reply.code, reply.code if name == "auth" else reply.text)
                if reply.code in {"LOADING", "BUSY"} or "max number of clients" in reply.text:
                    raise TierUnavailableError(f"{where} is not ready: {reply.code}")
                raise RefusedCredentialsError(str(refusal(where, known)))
            if reply.code not in {"NOPERM", "ERR"} or name == "database" or "max number" in reply.text:
                raise refusal(where, reply)
        elif name == "role" and isinstance(reply, list) and reply and reply[0] != b"master":
            raise TierUnavailableError(f"{where} is no master now; Sentinel is asked again")


_LATER = frozenset(
    {
        *("LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "READONLY", "MISCONF", "NOREPLICAS"),
        *("ASK", "UNBLOCKED", "FAILOVER", "NOGOODSLAVE"),
    }
)
"""Codes of what passes by itself, or by what the server's people do."""

_CURES = {
    "OOM": "; raise its maxmemory, or set maxmemory-policy to allkeys-lru or allkeys-lfu",
    "NOAUTH": "; set username and password_file, or password_variable",
    "WRONGPASS": "; check username and password_file, or password_variable",
    "NOPERM": "; allow the user GET, SET, EXISTS, UNLINK and SCAN on the keys of key_prefix",
    "MOVED": "; it is a node of a cluster: set mode to cluster",
    "MISCONF": "; it cannot save to its disk and takes no writes: see its log",
    "READONLY": "; it is a replica: name the master, or set mode to sentinel",
}
CREDENTIAL_CODES = frozenset({"NOAUTH", "WRONGPASS"})


def refusal(where: str, reply: ErrorReply) -> TierError:
    """Return the error for an error reply of the server."""
    text = reply.text if len(reply.text) <= 200 else f"{reply.text[:197]}..."
    message = f"{where} answered {text!r}{_CURES.get(reply.code, '')}"
    if reply.code == "OOM":
        return TierFullError(message)
    if reply.code in _LATER or "max number of clients" in reply.text:
        return TierUnavailableError(message)
    return TierError(message)


def no_connection(where: str, error: OSError | UnicodeError) -> TierError:
    """Return the error for a failed connect."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TierError(
            f"{where}: its certificate is not accepted: {error.verify_message};"
            " name its authority with tls_ca_file, or see tls_check_hostname"
        )
    if isinstance(error, ssl.SSLError):
        return TierUnavailableError(
            f"{where}: no TLS connection: {error.reason or error}; see whether its port speaks TLS,"
            " and whether it wants tls_cert_file"
        )
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TierUnavailableError(f"{where}: no connection: {text}; see whether it runs, and url")
