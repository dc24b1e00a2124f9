"""A TCP proxy before a real server: it can stop, break or refuse connections, or answer instead of the server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Self

from lmcache_async.testing.steps import DEADLINE_S

_PIECE = 1 << 16


class Direction:
    """One direction of a proxy. It passes bytes while open, and breaks a connection after `break_after` bytes."""

    def __init__(self) -> None:
        self.break_after: int | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._waiting = asyncio.Event()

    def shut(self) -> None:
        self._waiting.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        """Wait until bytes arrive while it is shut."""
        async with asyncio.timeout(DEADLINE_S):
            await self._waiting.wait()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Callable[[], None]
    ) -> None:
        """Pass bytes until `reader` ends, and call `seen` for each piece when it arrives."""
        passed = 0
        while piece := await reader.read(_PIECE):
            seen()
            if not self._open.is_set():
                self._waiting.set()
                await self._open.wait()
            if self.break_after is not None and passed + len(piece) > self.break_after:
                writer.write(piece[: self.break_after - passed])
                await writer.drain()
                raise ConnectionAbortedError("broken by the test")
            passed += len(piece)
            writer.write(piece)
            await writer.drain()


class Proxy:
    """Listens on `port`, with TLS if it has a context, and forwards to the server's port.

    Attributes:
        requests: The direction to the server.
        answers: The direction to the client.
        refuses: Whether new connections are reset.
        answer: Sent for every request instead of the server's answer, if not empty.
        most_waiting: Maximum number of connections with a request whose answer has not begun. A client may have more
            connections: one that it opened ahead, or one whose end has not arrived here.
    """

    def __init__(self, server_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.requests = Direction()
        self.answers = Direction()
        self.refuses = False
        self.answer = b""
        self.most_waiting = 0
        self._waiting: set[asyncio.StreamWriter] = set()
        self._server_port = server_port
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Break all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses or self._closing:  # the loop may have accepted it before
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: _abort(writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, ExceptionGroup, asyncio.IncompleteReadError):
                if self.answer:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(self.answer)
                    await writer.drain()
                else:
                    await self._pass_on(reader, writer)
        finally:
            self._waiting.discard(writer)
            writer.transport.abort() if not self.answer else writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def asked() -> None:
            self._waiting.add(writer)
            self.most_waiting = max(len(self._waiting), self.most_waiting)

        there, back = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            pumps = {
                asyncio.ensure_future(self.requests.pump(reader, back, asked)),
                asyncio.ensure_future(
                    self.answers.pump(there, writer, lambda: self._waiting.discard(writer))
                ),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            back.transport.abort()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Abort both sides. A task cancelled before its start closes nothing; a closed transport may have more to send."""
    if not writer.transport.is_closing():
        writer.transport.abort()
