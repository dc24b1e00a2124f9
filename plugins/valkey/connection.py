"""A connection to a server: commands and replies, records without a copy, and the errors of both."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.valkey.protocol import ErrorReply, ProtocolError, Reader, Replies, Reply
from lmcache_async.tiers.client import ClientConnection, deadline

SLICE_BYTES = 1 << 20
"""Bytes per transport write. asyncio's transport copies the part that the socket does not accept at once."""
TLS_SLICE_BYTES = 256 << 10


class RefusedLoginError(TierError):
    """The server rejects the user, the password or the database."""


class Connection(ClientConnection, asyncio.BufferedProtocol):
    """A connection, whose commands are answered in the order in which they were sent.

    While a record is transferred no other command may be under way. A command that fails or is cancelled
    halfway leaves unread replies: `idle` stays False, and the connection must be aborted.

    Args:
        copies: Whether sent bytes are copied first. TLS transports keep references to them.
    """

    def __init__(self, where: str, transfer_timeout_s: float, *, copies: bool) -> None:
        super().__init__(where)
        self._transfer_timeout_s = transfer_timeout_s
        self._slice_bytes = TLS_SLICE_BYTES if copies else SLICE_BYTES
        self._copies = copies
        self._reader = Reader()
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def idle(self) -> bool:
        """Whether no command is under way, so that any caller can send the next one."""
        return self.usable and self._reader.idle and self._writable.is_set()

    def check_answers(self, seconds: float, option: str) -> None:
        """Raise TierUnavailableError if the oldest command is not answered after that time.

        Its caller may have been cancelled before its own deadline.
        """
        if self._reader.asked_at + seconds < asyncio.get_running_loop().time():
            raise TierUnavailableError(f"{self.where}: no answer within {option} of {seconds} s")

    def call(self, message: bytes, count: int) -> asyncio.Future[list[Reply]]:
        """Send commands and return a future of their `count` short replies.

        If the future is cancelled, the replies are still received and dropped; the connection can be used further.
        """
        replies = Replies(count)
        self._send(message, replies)
        return replies.done

    async def fetch(self, message: bytes, buffer: Buffer) -> int | ErrorReply | None:
        """Send a command whose reply is one record, and receive the record into the buffer.

        After the call, also after a cancellation, nothing is received into the buffer any more.

        Returns:
            The length of the record, which was not received if it is longer than the buffer; None for a miss; or
            the server's error reply.
        """
        record = Replies(memory=buffer.view)
        try:
            self._send(message, record)
            async with self._deadline("complete record"):
                [length] = await record.done
        except BaseException:
            self.abort()
            raise
        finally:
            record.memory = None
        return cast("int | ErrorReply | None", length)

    async def store(self, head: bytes, content: memoryview, tail: bytes) -> Reply:
        """Send a command with a long argument and return the reply.

        The memory must not change during the call. After the call, also after a cancellation, the memory is
        not read any more.
        """
        replies = Replies()
        self._send(head, replies)
        try:
            async with self._deadline(f"reply to the write of {len(content)} bytes"):
                for start in range(0, len(content), self._slice_bytes):
                    await self._writable.wait()
                    if replies.done.done():  # the server refused the command before it was complete
                        self.abort()
                        break
                    self._send_slice(content, start)
                else:
                    self._send(tail)
                return (await replies.done)[0]
        except BaseException:
            self.abort()
            raise

    def discard(self) -> None:
        """Close a connection that was never established. uvloop does not call `connection_lost` for these."""
        self.abort()
        self.gone.set()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # TLS transports pause at the high-water mark itself, not above it: at 0 they would never resume.
        cast("asyncio.Transport", transport).set_write_buffer_limits(
            high=TLS_SLICE_BYTES if self._copies else 0
        )
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._error is not None:
            return
        try:
            self._reader.received(nbytes)
        except ProtocolError as error:
            self._lose(str(error))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _send(self, message: bytes, replies: Replies | None = None) -> None:
        transport = self.check()
        if replies is not None:
            self._reader.expect(replies)
        transport.write(message)

    def _send_slice(self, content: memoryview, start: int) -> None:
        """Send one slice. It is local to this frame, because tracebacks would keep its slab alive."""
        transport = self.check()
        piece = content[start : start + self._slice_bytes]
        transport.write(bytes(piece) if self._copies else piece)

    def _fail_calls(self) -> None:
        self._reader.fail(self._problem)
        self._writable.set()

    def _deadline(self, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        return deadline(self._transfer_timeout_s, self.where, what, "transfer_timeout_s")


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
    "NOPERM": "; allow the user GET, SET, EXISTS, UNLINK and SCAN on the keys of key_prefix, SELECT for a database in the URL, and CLUSTER SLOTS and ASKING in a cluster",
    "MOVED": "; it is a node of a cluster: set mode to cluster",
    "MISCONF": "; it rejects writes because it cannot save to its disk: see its log",
    "READONLY": "; it is a replica: use the URL of the master, or set mode to sentinel",
}


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
