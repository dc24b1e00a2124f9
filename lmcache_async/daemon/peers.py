"""The daemon's records for other hosts: a server that any RESP client can talk to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from lmcache_async.config.endpoint import is_loopback
from lmcache_async.daemon.peer_options import PeerOptions, Tokens
from lmcache_async.daemon.peer_session import PeerSession
from lmcache_async.daemon.replies import error_reply
from lmcache_async.daemon.scans import Scans
from lmcache_async.daemon.verbs import PeerCounts, Verbs
from lmcache_async.daemon.wire import Wire
from lmcache_async.errors import ConfigError
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.web.gate import Gate

if TYPE_CHECKING:
    from types import TracebackType

    from lmcache_async.daemon.pool import Pool

_KEEPALIVE_S = 30
_BACKLOG = 128
_MAX_KINDS = 32
"""Causes of ends that are counted each; there are fewer, unless we have errors that nobody knows of."""


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """What peers do.

    Attributes:
        connections: That are served now.
        max_connections: The bound.
        counts: Since the server was opened.
    """

    connections: int
    max_connections: int
    counts: PeerCounts = field(default_factory=PeerCounts)


class PeerServer:
    """Serves the pool's records to other hosts. Used on the pool's loop; open it as an async context.

    Args:
        pool: The records.
        options: Where, to whom, how long. Their files are read here.
        max_record_bytes: Longest record that is ever taken.

    Raises:
        ConfigError: A file that the options name cannot be used.
    """

    def __init__(self, pool: Pool, options: PeerOptions, *, max_record_bytes: int) -> None:
        self._pool = pool
        self._options = options
        self._max_record_bytes = max_record_bytes
        self._tokens = Tokens.read(options.token_file)
        self._tls = None if options.tls is None else options.tls.make_context()
        self._scans = Scans()
        self._counts = PeerCounts()
        self._gate: Gate
        self._sessions: set[asyncio.Task[None]] = set()
        self._wires: set[Wire] = set()
        self._closing = False
        self._logger = LimitedLogger(logging.getLogger(__name__))

    @property
    def port(self) -> int:
        """Where it listens; of use where the options say 0."""
        return self._gate.port

    def statistics(self) -> PeerStatistics:
        counts = replace(self._counts, ended=dict(self._counts.ended))
        return PeerStatistics(len(self._sessions), self._options.max_connections, counts)

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: There is no listening there.
        """
        listen, encrypted = self._options.listen, self._tls is not None
        if not (encrypted or is_loopback(listen.host)):
            self._logger.report("clear", "what peers read at %s is not encrypted; see peer.tls", listen)
        gate = Gate(
            lambda lost: Wire(self._begin, lost, encrypted=encrypted),
            most=self._options.max_connections,
            tls=self._tls,
            handshake_timeout_s=self._options.greeting_timeout_s,
            refuse=self._refuse,
            backlog=_BACKLOG,
        )
        try:
            await gate.open(listen.host, listen.port)
        except (OSError, UnicodeError) as error:
            text = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"peer.listen: cannot listen at {listen}: {text}") from error
        self._gate = gate
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listen no more and end all connections; no lease is left."""
        self._closing = True
        await self._gate.close()
        sessions, wires = list(self._sessions), list(self._wires)
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        for wire in wires:
            wire.abort()
            await wire.wait_closed()

    def _refuse(self, connection: socket.socket) -> None:
        self._counts.refused += 1
        if self._tls is None:  # nothing can be said before a handshake
            with contextlib.suppress(OSError):
                connection.send(error_reply("ERR max number of clients reached; see peer.max_connections"))

    def _begin(self, wire: Wire, transport: asyncio.Transport) -> None:
        if self._closing:  # the loop had accepted it, and tells us now
            wire.abort()
            return
        if (tcp := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # an old kernel; the deadlines hold all the same
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        self._wires.add(wire)
        task = asyncio.get_running_loop().create_task(self._serve(wire))
        self._sessions.add(task)
        task.add_done_callback(self._sessions.discard)

    async def _serve(self, wire: Wire) -> None:
        verbs = Verbs(
            self._pool,
            self._tokens,
            self._scans,
            writable=self._options.writable,
            max_record_bytes=self._max_record_bytes,
            counts=self._counts,
        )
        try:
            why = await PeerSession(wire, verbs, self._options).serve()
        except Exception as error:  # noqa: BLE001 - a border: what one peer does ends that connection alone
            why = f"{type(error).__name__}: {error}"
        finally:
            wire.abort()
            self._wires.discard(wire)
        if why:
            ended, kind = self._counts.ended, why.partition(":")[0]
            if kind not in ended and len(ended) >= _MAX_KINDS:
                kind = "other"
            ended[kind] = ended.get(kind, 0) + 1
            self._logger.report("ended", "a peer's connection was ended: %.200s", why)
