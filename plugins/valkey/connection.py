"""Connections to a server: commands and replies, transfer of records without a copy, and conversion of errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal, cast

from lmcache_async.config.values import Endpoint
from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.valkey.config import ValkeyConfig
from lmcache_async.plugins.valkey.protocol import ErrorReply, ProtocolError, Reader, Replies, Reply, encode
from lmcache_async.tiers.client import ClientConnection, deadline

SLICE_BYTES = 1 << 20
"""Bytes per transport write. asyncio's transport copies the part that the socket does not accept at once."""
TLS_SLICE_BYTES = 256 << 10
_NAME = b"lmcache-async"
_KEEPALIVE_S = 30
"""TCP keep-alive: idle seconds before the first probe."""


class RefusedLoginError(TierError):
    """The server rejects the user, the password or the database."""


class Connection(ClientConnection, asyncio.BufferedProtocol):
    """A connection, whose commands are answered in the order in which they were sent.

    While a record is transferred no other command may be under way. A command that fails or is cancelled
    halfway leaves unread replies: `idle` stays False, and the connection must be aborted.

    Args:
        copies: Whether bytes are copied before they are sent, because TLS transports keep references to them.
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
        """Raise TierUnavailableError if the oldest command has waited for its reply for more than `seconds`.

        Its own deadline does not detect this if its caller was cancelled before.
        """
        if self._reader.asked_at + seconds < asyncio.get_running_loop().time():
            raise TierUnavailableError(f"{self.where}: no answer within {option} of {seconds} s")

    def call(self, message: bytes, count: int) -> asyncio.Future[list[Reply]]:
        """Send commands and return a future of their `count` short replies.

        If the future is cancelled, the replies are still received and dropped; the connection remains usable.
        """
        replies = Replies(count)
        self._send(message, replies)
        return replies.done

    def call_each(self, message: bytes, count: int) -> list[asyncio.Future[list[Reply]]]:
        """Send commands as `call` does, and return a future of each reply. One may arrive before the connection is lost."""
        waiters = [Replies() for _ in range(count)]
        self._send(message, *waiters)
        return [replies.done for replies in waiters]

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

    def _send(self, message: bytes, *waiters: Replies) -> None:
        transport = self.check()
        for replies in waiters:
            self._reader.expect(replies)
        transport.write(message)

    def _send_slice(self, content: memoryview, start: int) -> None:
        """Send one slice. Only this frame refers to it, because a traceback of the caller would keep its slab alive."""
        transport = self.check()
        piece = content[start : start + self._slice_bytes]
        transport.write(bytes(piece) if self._copies else piece)

    def _fail_calls(self) -> None:
        self._reader.fail(self._problem)
        self._writable.set()

    def _deadline(self, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        return deadline(self._transfer_timeout_s, self.where, what, "transfer_timeout_s")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Settings of connections to servers of one kind."""

    config: ValkeyConfig
    auth: tuple[bytes, ...] = field(repr=False)  # the AUTH command; empty without a password
    tls: ssl.SSLContext | None  # None for connections without encryption
    kind: Literal["valkey", "sentinel"] = "valkey"


class Node:
    """Connections to one server, opened on demand and reused.

    `on_failure` is called if the server could not be reached or did not answer.
    """

    def __init__(
        self, endpoint: Endpoint, settings: ConnectionSettings, on_failure: Callable[[], None]
    ) -> None:
        config = settings.config
        self.endpoint = endpoint
        self.where = f"{settings.kind} at {endpoint}"
        self._settings = settings
        self._config = config
        self._on_failure = on_failure
        # For Sentinels the connect timeout, so that time is left for the next Sentinel if one hangs.
        self._answer_option = "connect_timeout_s" if settings.kind == "sentinel" else "lookup_timeout_s"
        self._pause_s = config.node_pause_s if config.effective_mode == "cluster" else 0.0
        self._shared: Connection | None = None
        self._connecting = asyncio.Lock()
        self._slots = asyncio.Semaphore(config.connections)
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._ended: TierError | None = None  # why there are no connections any more
        self._failure: tuple[float, str] | None = None  # time and message

    @property
    def suspended(self) -> bool:
        """Whether the node failed less than `node_pause_s` seconds ago. Always False outside of a cluster."""
        return self._failure is not None and self._now() < self._failure[0] + self._pause_s

    @property
    def failed(self) -> bool:
        """Whether it failed, and no connection succeeded since."""
        return self._failure is not None

    async def call(self, message: bytes, count: int) -> list[Reply]:
        """Send commands on the shared connection and return their replies. If they are late, the connection is aborted."""
        shared: Connection | None = None
        option = self._answer_option
        seconds: float = getattr(self._config, option)
        try:
            async with deadline(seconds, self.where, "answer", option):
                async with self._connecting:
                    if self._shared is None or not self._shared.usable:
                        self._shared = await self._connect()
                    shared = self._shared
                shared.check_answers(seconds, option)
                return await shared.call(message, count)
        except TierUnavailableError as error:
            if shared is not None:
                shared.abort(error)
            self._note_failure(error)
            raise

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Reserve a connection for one record. It is closed afterwards if replies are outstanding."""
        seconds = self._config.transfer_timeout_s
        async with deadline(seconds, self.where, "free connection", "transfer_timeout_s"):
            await self._slots.acquire()
        connection: Connection | None = None
        try:
            connection = self._take_free() or await self._connect()
            yield connection
        except TierUnavailableError as error:
            self._note_failure(error)
            raise
        finally:
            self._slots.release()
            if connection is not None and connection.idle:
                self._free.append(connection)
            elif connection is not None:
                connection.abort()

    def close(self, why: TierError) -> None:
        """Close all connections. Calls under way and later ones fail with the error."""
        self._ended = why
        self._free.clear()
        for connection in self._all:
            connection.abort(why)

    async def wait_closed(self) -> None:
        """Wait until the sockets are closed, after `close`."""
        for connection in tuple(self._all):
            await connection.wait_closed()

    def _take_free(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.idle:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        """Connect and authenticate. No connection is left open if the call is cancelled.

        Raises:
            TierUnavailableError: The server cannot be reached, is not ready, or failed a moment ago.
            RefusedLoginError: The server rejects the user, the password or the database.
            TierError: The certificate is invalid, or the server refuses the connection.
        """
        if self.suspended and self._failure is not None:
            raise TierUnavailableError(
                f"{self._failure[1]}; it is contacted again after node_pause_s of {self._pause_s} s"
            )
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        config = self._config
        connection = Connection(self.where, config.transfer_timeout_s, copies=self._settings.tls is not None)
        self._all = {one for one in self._all if not one.gone.is_set()}
        self._all.add(connection)  # before it is open, so that `close` aborts it
        try:
            async with deadline(config.connect_timeout_s, self.where, "connection", "connect_timeout_s"):
                try:
                    await self._open(connection)
                except BaseException:
                    connection.discard()
                    raise
                await self._handshake(connection)
        except BaseException as error:
            connection.abort()
            if isinstance(error, OSError | UnicodeError):
                raise connect_error(self.where, error) from error
            raise
        self._failure = None
        return connection

    async def _open(self, connection: Connection) -> None:
        loop, endpoint, tls = asyncio.get_running_loop(), self.endpoint, self._settings.tls
        if endpoint.path:
            await loop.create_unix_connection(lambda: connection, endpoint.path)
            return
        transport, _ = await loop.create_connection(
            lambda: connection,
            endpoint.host,
            endpoint.port,
            ssl=tls,
            server_hostname=None if tls is None else endpoint.host,
        )
        if (tcp := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # it was closed, or an old kernel; the deadlines apply
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)

    async def _handshake(self, connection: Connection) -> None:
        """Authenticate, set the name, select the database and check the role in one message.

        The server may refuse to set the name or return the role if the user has few permissions. This is ignored.
        """
        config, to_server = self._config, self._settings.kind == "valkey"
        commands = {"auth": self._settings.auth, "name": (b"CLIENT", b"SETNAME", _NAME)}
        if to_server and config.address.database:
            commands["database"] = (b"SELECT", b"%d" % config.address.database)
        if to_server and config.effective_mode == "sentinel":
            commands["role"] = (b"ROLE",)
        asked = {name: command for name, command in commands.items() if command}
        message = b"".join(encode(*command) for command in asked.values())
        for name, answer in zip(asked, connection.call_each(message, len(asked)), strict=True):
            try:
                [reply] = await answer
            except TierUnavailableError as error:
                raise TierUnavailableError(
                    f"{error}; check whether its port is of a {self._settings.kind} server, uses TLS, or requires a client"
                    " certificate in tls_cert_file"
                ) from error
            if isinstance(reply, ErrorReply):
                self._check_refusal(name, reply)
            elif name == "role" and isinstance(reply, list) and reply and reply[0] != b"master":
                raise TierUnavailableError(
                    f"{self.where} is not a master any more; the master is requested from Sentinel again"
                )

    def _check_refusal(self, name: str, reply: ErrorReply) -> None:
        """Raise the error for a refused command of the greeting, unless the refusal can be ignored."""
        if reply.text.startswith(_TOO_MANY_CLIENTS):
            raise refusal(self.where, reply)
        if name == "auth" or reply.code in {"NOAUTH", "WRONGPASS"}:
            if reply.code in {"LOADING", "BUSY"}:
                raise TierUnavailableError(f"{self.where} is not ready: {reply.code}")
            # For AUTH only the code: the reply to an unknown command repeats the arguments, here the password.
            known = ErrorReply(reply.code, reply.code) if name == "auth" else reply
            raise RefusedLoginError(str(refusal(self.where, known)))
        if name == "database" and reply.code == "ERR":
            raise RefusedLoginError(f"{refusal(self.where, reply)}; check the number of the database in url")
        if reply.code not in {"NOPERM", "ERR"} or name == "database":
            raise refusal(self.where, reply)

    def _note_failure(self, error: TierError) -> None:
        if not self.suspended:
            self._failure = (self._now(), str(error))
        self._on_failure()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


_TEMPORARY = frozenset(
    {
        *("LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "READONLY", "MISCONF", "NOREPLICAS"),
        *("ASK", "UNBLOCKED", "FAILOVER", "NOGOODSLAVE"),
    }
)
"""Error codes of temporary conditions."""

_TOO_MANY_CLIENTS = "ERR max number of clients"

_ADVICE = {
    "OOM": "; raise its maxmemory, or set maxmemory-policy to allkeys-lru or allkeys-lfu",
    "NOAUTH": "; set username and password_file, or password_variable",
    "WRONGPASS": "; check username and password_file, or password_variable, which are read at start",
    "NOPERM": "; allow the user GET, SET, EXISTS, UNLINK and SCAN on the keys of key_prefix, SELECT for a database in the URL, and CLUSTER SLOTS and ASKING in a cluster",
    "MOVED": "; it is a node of a cluster: set mode to cluster",
    "MISCONF": "; it rejects writes because it cannot save to its disk: see its log",
    "READONLY": "; it is a replica: use the URL of the master, or set mode to sentinel",
}


def refusal(where: str, reply: ErrorReply) -> TierError:
    """Return the error for an error reply of the server."""
    text = reply.text if len(reply.text) <= 200 else f"{reply.text[:197]}..."
    message = f"{where} answered {text!r}{_ADVICE.get(reply.code, '')}"
    if reply.code == "OOM":
        return TierFullError(message)
    if reply.text.startswith(_TOO_MANY_CLIENTS):
        return TierUnavailableError(f"{message}; raise its maxclients, or use fewer connections")
    if reply.code in _TEMPORARY:
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
    return TierUnavailableError(
        f"{where}: cannot connect: {text}; check that it is running and that url is correct"
    )
