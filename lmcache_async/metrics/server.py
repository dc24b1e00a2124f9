"""Server of the status endpoint: one request per connection, bounded in number and time.

Only `endpoint.status_server` imports this module, because aiohttp is an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Self

from aiohttp import web

from lmcache_async.config import HTTPConfig
from lmcache_async.config.values import is_loopback
from lmcache_async.errors import ConfigError
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.charts import Sample, Source
from lmcache_async.metrics.http import HEADERS, AccessTokens, Responder

INTERVAL_S = 1.0
"""Seconds between two samples."""
MAX_SAMPLES = 301
"""Five minutes of samples; a chart has one value less."""

_SILENT = logging.getLogger(f"{__name__}.aiohttp")
"""aiohttp logs a traceback of each invalid request. Errors of this package are logged by `StatusServer`."""
_SILENT.setLevel(logging.CRITICAL + 1)

_LIMITS: dict[str, Any] = {
    "access_log": None,
    "logger": _SILENT,
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

    A connection counts against the limit as soon as it is accepted, before its TLS handshake. Connections above the
    limit are closed before anything is read.
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
            AccessTokens.read(config.token_file),
            loopback=is_loopback(self._host),
            interval_s=interval_s,
        )
        self._timeout_s = config.timeout_s
        self._max_connections = config.max_connections
        self._logger = LimitedLogger(logging.getLogger(__name__))
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Number of connections, including those in their TLS handshake."""
        return len(self._connections)

    @property
    def url(self) -> str:
        """Address of the page; of a host with several addresses, the first one."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = self._listeners[0].getsockname()[1]
        return f"{'https' if self._tls else 'http'}://{host}:{port}/"

    async def __aenter__(self) -> Self:
        """Listen, and take samples."""
        place = f"{self._host}:{self._port}"
        if self._port > _MAX_PORT:
            raise ConfigError(f"http.listen: port plus rank is {self._port}; the highest port is {_MAX_PORT}")
        self._server = web.Server(self._answer, **_LIMITS)
        try:
            self._listeners = await _listen(self._host, self._port)
        except (OSError, UnicodeError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"http.listen: cannot listen at {place}: {text}; name another address or port"
            ) from error
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

    async def __aexit__(self, *error: object) -> None:
        """Stop listening and end all connections."""
        tasks = (*self._tasks, *self._connections)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for listener in self._listeners:
                listener.close()
        await self._server.shutdown(_CLOSE_S)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            made = self._responder.respond(request.method, request.path, request.headers)
            headers = {**HEADERS, "Content-Type": made.kind, **made.headers}
            response = web.Response(status=made.status, body=made.body, headers=headers)
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
            self._logger.log(
                logging.ERROR, repr(error), "cannot take a sample for the charts: %r", error, exc_info=True
            )

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
            if len(self._connections) >= self._max_connections:
                connection.close()
            else:
                task = _start(self._connections, self._serve(connection))
                # Not in the task, which may be cancelled before it begins.
                task.add_done_callback(partial(_close, connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it ends, at the latest at its deadline."""
        loop = asyncio.get_running_loop()
        handler = _Handler(self._server, loop=loop, **_LIMITS)
        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(lambda: handler, connection, ssl=self._tls)
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(connecting)
                await handler.ended
        except OSError:  # the deadline, or caused by the other end
            pass
        finally:
            if self._tls is not None:  # without TLS, connecting ends within one iteration of the loop
                connecting.cancel()
            try:
                await asyncio.gather(connecting, return_exceptions=True)
            finally:  # also if cancelled again
                if handler.transport is not None:
                    handler.transport.abort()
            if handler.transport is not None:
                await handler.ended


class _Handler(web.RequestHandler):
    """Protocol of a connection. `ended` is done when the connection is lost."""

    __slots__ = ("ended",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ended = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        super().connection_lost(exc)


def _close(connection: socket.socket, _: object) -> None:
    connection.close()


def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen at every address of the host that is one of this machine."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as undo:
        listeners = []
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = undo.enter_context(socket.create_server(address, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                    raise OSError(error.errno, os.strerror(error.errno or 0)) from error
                continue
            listener.setblocking(False)
            listeners.append(listener)
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, "the host has no address of this machine")
        undo.pop_all()
    return listeners
