"""A connection for one coroutine: what it asks for is received into its memory, and nothing else is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from lmcache_async.resp.connection import CLOSE_S, SLICE_BYTES, TLS_SLICE_BYTES

_EARLY_BYTES = 256


class ConnectionEndedError(Exception):
    """The other end has gone, or we gave the connection up."""


class Wire(asyncio.BufferedProtocol):
    """`receive` into memory, `send` from memory.

    What is sent goes from the memory given to the kernel; asyncio's own loop copies what the socket does
    not take at once, uvloop's does not, and TLS does on both. Once `receive` or `send` has ended the memory
    is touched no more, after a failure or a cancellation of `send` only once the connection is aborted.

    Args:
        made: Told when the connection is there.
        lost: Told when it is not any more.
        encrypted: Whether it is TLS.
    """

    def __init__(
        self,
        made: Callable[[Wire, asyncio.Transport], None],
        lost: Callable[[], None],
        *,
        encrypted: bool,
    ) -> None:
        self._made = made
        self._lost = lost
        self._encrypted = encrypted
        self._slice_bytes = TLS_SLICE_BYTES if encrypted else SLICE_BYTES
        self._transport: asyncio.Transport | None = None
        self._ended = False
        self._memory: memoryview | None = None  # what is received goes there
        self._early = bytearray()  # what came while nobody asked
        self._spare = bytearray(_EARLY_BYTES)
        self._filled = 0
        self._least = 0
        self._received: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._gone = asyncio.get_running_loop().create_future()

    async def receive(self, memory: memoryview, least: int) -> int:
        """Wait until at least `least` bytes have come into the memory; how many there are.

        Raises:
            ConnectionEndedError: They will not come.
        """
        transport = self._usable()
        filled = min(len(self._early), len(memory))
        memory[:filled] = self._early[:filled]
        del self._early[:filled]
        if filled >= least:
            return filled
        self._memory, self._filled, self._least = memory, filled, least
        self._received = asyncio.get_running_loop().create_future()
        transport.resume_reading()
        try:
            await self._received
        finally:
            self._memory = self._received = None
            self._pause()
        return self._filled

    async def send(self, content: memoryview, *, before: bytes = b"", after: bytes = b"") -> None:
        """Send `before`, the content and `after`; ends when the kernel has all of it, or TLS has.

        Raises:
            ConnectionEndedError: It was not sent, or not all of it.
        """
        if before:
            self._usable().write(before)
        for start in range(0, len(content), self._slice_bytes):
            piece = content[start : start + self._slice_bytes]
            self._usable().write(bytes(piece) if self._encrypted else piece)
            del piece
            if start + self._slice_bytes >= len(content) and after:
                self._usable().write(after)
            while self._writable is not None:
                await self._writable
        self._usable()

    def abort(self) -> None:
        """Close at once, without waiting for anything; who waits gets the error."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def close(self) -> None:
        """Close when what was sent has gone; what comes is read no more."""
        self._ended = True
        if self._transport is not None:
            self._transport.close()
        self._wake()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed; after `abort`, that is in a moment."""
        if not self._gone.done():
            await asyncio.wait([self._gone], timeout=CLOSE_S)

    # What the transport tells us.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()
        # TLS transports pause at the mark itself, not above it: at 0 they would never resume.
        self._transport.set_write_buffer_limits(high=TLS_SLICE_BYTES if self._encrypted else 0)
        self._made(self, self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        if self._memory is None:
            return memoryview(self._spare)
        return self._memory[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._memory is None:  # uvloop reads once before it looks whether it shall
            self._early += self._spare[:nbytes]
            self._pause()
            return
        self._filled += nbytes
        if self._filled >= self._least and self._received is not None and not self._received.done():
            self._pause()
            self._received.set_result(None)

    def eof_received(self) -> bool:
        self._end()
        return False

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            error.__traceback__ = None  # its frames hold the memory that was read or written
        self._end()
        self._lost()
        if not self._gone.done():
            self._gone.set_result(None)

    def _usable(self) -> asyncio.Transport:
        if self._ended or self._transport is None or self._transport.is_closing():
            raise ConnectionEndedError
        return self._transport

    def _pause(self) -> None:
        if not self._ended and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._received is not None and not self._received.done():
            self._received.set_exception(ConnectionEndedError())
            self._received.exception()  # looked at: its waiter may have been cancelled
        self.resume_writing()
