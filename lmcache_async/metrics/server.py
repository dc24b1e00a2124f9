"""Server of the status endpoint: one request per connection, bounded in number and time.

Only `endpoint.status_server` imports this module, because aiohttp is an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import deque
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from lmcache_async.config.values import is_loopback
from lmcache_async.errors import ConfigError
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.http import Responder, Tokens

if TYPE_CHECKING:
    from lmcache_async.config import HTTPConfig
    from lmcache_async.metrics.charts import Sample, Source

INTERVAL_S = 1.0
"""Seconds between two samples."""
MAX_SAMPLES = 301
"""Five minutes of samples; a chart has one value less."""

_LIMITS: dict[str, Any] = {
    "access_log": None,
    "lingering_time": 0,  # bodies are not read
    "max_field_size": 8192,
    "max_line_size": 2048,
}
_BACKLOG = 16
_RETRY_S = 0.1
_CLOSE_S = 1.0
_MAX_PORT = 65535


class StatusServer:
    """Serves a source on its loop, as an async context.

    A connection counts against the limit from its accept on, with or without a TLS handshake. Connections above
    the limit are closed before anything is read.

    Args:
        source: Content of the page.
        config: Configuration with `listen`. Its files are read here.
        rank: Added to the port: each rank of each replica of an engine serves its own page.
        interval_s: Seconds between two samples.

    Raises:
        ConfigError: A configured file cannot be used.
    """

    def __init__(
        self, source: Source, config: HTTPConfig, *, rank: int = 0, interval_s: float = INTERVAL_S
    ) -> None:
        assert config.listen is not None
        self._host = config.listen.host
        self._port = config.listen.port + rank if config.listen.port else 0
        self._source = source
        self._tls = config.make_context()
        self._interval_s = interval_s
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._responder = Responder(
            source,
            self._samples,
            Tokens.read(config.token_file),
            loopback=is_loopback(self._host),
            interval_s=interval_s,
        )
        self._timeout_s = config.timeout_s
        self._max_connections = config.max_connections
        self._logger = LimitedLogger(logging.getLogger(__name__))
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()
        self._open: set[_Connection] = set()

    @property
    def url(self) -> str:
        """Address of the page; of a host with several addresses, the first one."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = self._listeners[0].getsockname()[1]
        return f"{'https' if self._tls else 'http'}://{host}:{port}/"

    async def __aenter__(self) -> Self:
        """Listen, and take samples.

        Raises:
            ConfigError: The address cannot be used.
        """
        place = f"{self._host}:{self._port}"
        if self._port > _MAX_PORT:
            raise ConfigError(f"http.listen: with the rank added it is {place}; ports end at {_MAX_PORT}")
        self._server = web.Server(self._answer, **_LIMITS)
        try:
            self._listeners = await _listen(self._host, self._port)
        except (OSError, UnicodeError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"http.listen: cannot listen at {place}: {text}") from error
        if self._tls is None and not is_loopback(self._host):
            self._logger.report(
                "clear",
                "connections to %s, tokens included, are not encrypted; see http.tls_cert_file",
                place,
            )
        self._logger.logger.info("status page and metrics at %s", self.url)
        self._take_sample()
        _start(self._tasks, self._sample())
        for listener in self._listeners:
            _start(self._tasks, self._accept(listener))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and end all connections."""
        for task in (*self._tasks, *(() if self._tls is None else self._connecting)):
            task.cancel()
        # Without a handshake a connection is made within one iteration of the loop.
        await asyncio.gather(*self._tasks, *self._connecting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._open):
            connection.abort()
        await self._server.shutdown(_CLOSE_S)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            made = self._responder.respond(request.method, request.path, request.headers)
            response = web.Response(status=made.status, body=made.body, headers=made.all_headers)
        except Exception as error:  # an error here must not affect the engine
            self._logger.log(logging.ERROR, repr(error), "%s: %r", request.path, error, exc_info=True)
            response = web.Response(status=500, text="internal error; see the log\n")
        response.force_close()
        return response

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._take_sample()

    def _take_sample(self) -> None:
        try:
            self._samples.append(self._source.sample())
        except Exception as error:  # as in _answer
            self._logger.log(logging.ERROR, repr(error), "no sample: %r", error, exc_info=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # such as too many open files, which may pass
                self._logger.report("accept", "no connection can be accepted: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._accepted) >= self._max_connections:
                connection.close()
            else:
                self._accepted.add(connection)
                _start(self._connecting, self._connect(connection))

    async def _connect(self, connection: socket.socket) -> None:
        """Make the connection's transport. The protocol's `connection_lost` frees its place afterwards."""
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self, connection),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._timeout_s,
            )
        except BaseException as error:
            self._accepted.discard(connection)
            connection.close()
            if isinstance(error, OSError):  # caused by the other end
                return
            raise
        if transport.is_closing():  # lost in its handshake: the protocol may not know
            self._accepted.discard(connection)


class _Connection(web.RequestHandler):
    """Protocol of a connection, which ends at its deadline in any case."""

    __slots__ = ("_deadline", "_owner", "_socket")

    def __init__(self, owner: StatusServer, connection: socket.socket) -> None:
        super().__init__(owner._server, loop=asyncio.get_running_loop(), **_LIMITS)
        self._owner = owner
        self._socket = connection
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        owner = self._owner
        owner._open.add(self)
        self._deadline = asyncio.get_running_loop().call_later(owner._timeout_s, self.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner._open.discard(self)
        self._owner._accepted.discard(self._socket)
        super().connection_lost(exc)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen at every address of the host that this machine has.

    Raises:
        OSError: An address is in use, or no address can be used.
        UnicodeError: The host is not a valid name.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as undo:
        listeners = []
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError:  # the kernel does not support the family
                continue
            undo.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # the same port of IPv4 has its own listener
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind(address)
                listener.listen(_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listener.close()
                continue
            listeners.append(listener)
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, "it has no address of this machine")
        undo.pop_all()
    return listeners
