"""The lookup client's connection to one rank: found again when it is lost, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from lmcache_async.integration.vllm.wire import Identity, Message, check_peer, encode, receive
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = LimitedLogger(logging.getLogger(__name__))

_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 2.0


class Link:
    """Asks one rank. All of it runs on the client's loop.

    Attributes:
        identity: The rank's own, while connected.

    Args:
        changed: Called after `identity` has changed.
    """

    def __init__(self, rank: int, path: Path, changed: Callable[[], None]) -> None:
        self._rank = rank
        self._path = path
        self._changed = changed
        self.identity: Identity | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Message | None]] = {}
        self._next_id = 0
        self._root: bytes | None = None
        self._ended = False  # the rank said goodbye and has not come back

    async def run(self) -> None:
        """Stay connected until cancelled."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                if not self._ended:
                    logger.report(
                        "connect " + str(self._path),
                        "rank %d cannot be asked yet (%s); all are misses",
                        self._rank,
                        error,
                    )
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            if await self._converse(reader, writer):
                retry_s = _FIRST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def call(self, message: Message) -> Message | None:
        """The answer; None where there is none to be had: not connected, connection lost, or it failed."""
        if self._writer is None or self.identity is None:
            return None
        return await self._ask(message)

    def post(self, message: Message) -> None:
        """Send what has no answer; lost while not connected."""
        if self._writer is not None:
            self._writer.write(encode(message))

    async def _ask(self, message: Message) -> Message | None:
        self._next_id += 1
        message_id = self._next_id
        future: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._waiting[message_id] = future
        self.post({"id": message_id, **message})
        try:
            return await future
        finally:
            del self._waiting[message_id]

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Until the connection is lost; whether it ever served."""
        served = False
        try:
            async with asyncio.TaskGroup() as group:
                check_peer(writer)
                self._writer = writer
                group.create_task(self._greet())
                while True:
                    self._deliver(await receive(reader))
        except* (EOFError, ConnectionError) as lost:
            if not self._ended:
                cause = "lost " + str(self._path)
                logger.log(
                    logging.INFO, cause, "connection to rank %d is lost: %s", self._rank, lost.exceptions[0]
                )
        except* (OSError, ValueError) as bad:
            logger.report(
                "bad " + str(self._path), "rank %d cannot be asked: %s", self._rank, bad.exceptions[0]
            )
        finally:
            served = self.identity is not None
            self._writer = None
            self.identity = None
            self._changed()
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return served

    def _deliver(self, message: Message) -> None:
        if message.get("op") == "goodbye":
            self._ended = True
        message_id = message.get("id")
        future = self._waiting.get(message_id) if isinstance(message_id, int) else None
        if future is not None and not future.done():
            future.set_result(None if "error" in message else message)

    async def _greet(self) -> None:
        answer = await self._ask({"op": "hello"})
        if answer is None:
            return
        identity = Identity.of(answer)
        if self._root not in (None, identity.root):
            raise ValueError("the rank came back with another namespace")
        self._root = identity.root
        self.identity = identity
        self._ended = False
        self._changed()
