"""New connections: TCP, TLS or a Unix socket; user, database and role said and checked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.resp.answers import CREDENTIAL_CODES, no_connection, refusal
from lmcache_async.resp.connection import Connection, deadline
from lmcache_async.resp.wire import ErrorReply, encode

if TYPE_CHECKING:
    import ssl

    from lmcache_async.config.endpoint import Endpoint
    from lmcache_async.resp.access import Credentials
    from lmcache_async.resp.wire import Reply

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
        kind: What messages call the server.
        option: That which names the server, for messages.
    """

    credentials: Credentials
    tls: ssl.SSLContext | None
    timeout_s: float
    database: int = 0
    master_only: bool = False
    kind: str = "valkey"
    option: str = "url"

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
                raise no_connection(where, error, self.option) from error
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
