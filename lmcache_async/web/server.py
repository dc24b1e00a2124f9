"""The server: one request a connection, bounded in number and time. Only `opening` imports it: aiohttp is an extra."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from lmcache_async.config.values import is_loopback
from lmcache_async.errors import ConfigError
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.web.access import Tokens
from lmcache_async.web.answers import Answers
from lmcache_async.web.gate import Gate

if TYPE_CHECKING:
    from lmcache_async.config import HTTPConfig
    from lmcache_async.web.source import Sample, Source

INTERVAL_S = 1.0
"""Between two samples."""
MAX_SAMPLES = 301
"""Five minutes of them; a chart has one value less than there are samples."""

_LIMITS: dict[str, Any] = {
    "access_log": None,
    "lingering_time": 0,  # bodies are not read
    "max_field_size": 8192,
    "max_line_size": 2048,
}
_BACKLOG = 16
_CLOSE_S = 1.0
_MAX_PORT = 65535


class StatusServer:
    """Serves what a source tells. Used on the source's loop; open it as an async context.

    Args:
        source: What is shown.
        config: Where, and to whom; `listen` is set. Its files are read here.
        rank: Added to the port: each rank of each replica of an engine serves its own.
        interval_s: Between two samples.

    Raises:
        ConfigError: A file that the config names cannot be used.
    """

    def __init__(
        self, source: Source, config: HTTPConfig, *, rank: int = 0, interval_s: float = INTERVAL_S
    ) -> None:
        assert config.listen is not None  # or nobody opens a server
        self._host = config.listen.host
        self._port = config.listen.port + rank if config.listen.port else 0
        self._source = source
        self._tls = config.make_context()
        self._interval_s = interval_s
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._answers = Answers(
            source,
            self._samples,
            Tokens.read(config.token_file),
            loopback=is_loopback(self._host),
            interval_s=interval_s,
        )
        self._timeout_s = config.timeout_s
        self._max_connections = config.max_connections
        self._logger = LimitedLogger(logging.getLogger(__name__))
        self._open: set[_Connection] = set()
        self._closing = False
        self._sampling: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is served."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._gate.port}/"

    async def __aenter__(self) -> Self:
        """Listen, and take samples.

        Raises:
            ConfigError: There is no listening there.
        """
        place = f"{self._host}:{self._port}"
        if self._port > _MAX_PORT:
            raise ConfigError(f"http.listen: with the rank added it is {place}; ports end at {_MAX_PORT}")
        self._server = web.Server(self._answer, **_LIMITS)
        gate = Gate(
            lambda lost: _Connection(self, lost),
            most=self._max_connections,
            tls=self._tls,
            handshake_timeout_s=self._timeout_s,
            backlog=_BACKLOG,
        )
        try:
            await gate.open(self._host, self._port)
        except (OSError, UnicodeError) as error:
            text = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"http.listen: cannot listen at {place}: {text}") from error
        self._gate = gate
        if self._tls is None and not is_loopback(self._host):
            self._logger.report(
                "clear", "what is read at %s is not encrypted, tokens too; see http.tls_cert_file", place
            )
        self._logger.logger.info("status page and metrics at %s", self.url)
        self._take_sample()
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listen no more and end all connections."""
        self._closing = True
        await self._gate.close()
        for connection in tuple(self._open):
            connection.abort()
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait({self._sampling})
        await self._server.shutdown(_CLOSE_S)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            told = self._answers.answer(request.method, request.path, request.headers)
            response = web.Response(status=told.status, body=told.body, headers=told.all_headers)
        except Exception as error:  # a border: what cannot be shown ends no engine
            self._logger.log(logging.ERROR, repr(error), "%s: %r", request.path, error, exc_info=True)
            response = web.Response(status=500, text="this cannot be shown; the log says why\n")
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


class _Connection(web.RequestHandler):
    """Ends in time, whatever its other side does or does not do."""

    __slots__ = ("_deadline", "_lost", "_owner")

    def __init__(self, owner: StatusServer, lost: Callable[[], None]) -> None:
        super().__init__(owner._server, loop=asyncio.get_running_loop(), **_LIMITS)
        self._owner = owner
        self._lost = lost
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        owner = self._owner
        owner._open.add(self)
        if owner._closing:  # it was let in before, and is told to us now
            self.abort()
        else:
            self._deadline = asyncio.get_running_loop().call_later(owner._timeout_s, self.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner._open.discard(self)
        self._lost()
        super().connection_lost(exc)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
