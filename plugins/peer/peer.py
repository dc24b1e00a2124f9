"""One peer: its connections while it is there, and a look for it in the background while it is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.resp.answers import refusal
from lmcache_async.resp.dialer import RefusedCredentialsError
from lmcache_async.resp.node import Node
from lmcache_async.resp.wire import ErrorReply, Reply, encode, encode_each, encode_head, encode_tail

if TYPE_CHECKING:
    from lmcache_async.config.endpoint import Endpoint
    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.peer.config import PeerConfig
    from lmcache_async.resp.dialer import Dialer
    from lmcache_async.tiers.base import Allocate

logger = logging.getLogger(__name__)

MAX_RETRY_S = 30.0
_CURES = {
    "OOM": "; raise the daemon's max_bytes, or the tenant's",
    "NOAUTH": "; set username and password_file, or password_variable",
    "WRONGPASS": "; check username and password_file, or password_variable",
    "NOPERM": "; set peer.writable of the daemon, or write_to: none here",
}


class Peer:
    """Once it could not be reached or did not answer, no call waits for it until it has answered again.

    Args:
        endpoint: Where its daemon listens.
        dialer: Makes connections.
        config: Deadlines, and how many records move at a time.
    """

    def __init__(self, endpoint: Endpoint, dialer: Dialer, config: PeerConfig) -> None:
        self.node = Node(
            endpoint,
            dialer,
            connections=config.connections,
            lookup_timeout_s=config.lookup_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
            on_trouble=self._lost,
        )
        self.moving = 0
        self._timeout_s = config.transfer_timeout_s
        self._retry_s = config.retry_s
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def away(self) -> bool:
        return self._looking is not None

    async def ask_each(self, command: bytes, names: Sequence[bytes]) -> list[Reply]:
        """The command for each name, in one message.

        Raises:
            TierError: It is away, fails or refuses.
        """
        self._check()
        try:
            replies = await self.node.call(encode_each(command, names), len(names))
        except RefusedCredentialsError:
            self._lost()
            raise
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise refusal(self.node.where, reply, _CURES)
        return replies

    async def fetch(self, name: bytes, allocate: Allocate) -> Buffer | None:
        """The record in a buffer of `allocate`'s; None where there is none.

        Raises:
            TierError: It is away, fails or refuses.
        """
        self._check()
        self.moving += 1
        try:
            async with self.node.connection() as connection:
                answer = await connection.fetch(
                    encode(b"GET", name), allocate, before=0, timeout_s=self._timeout_s
                )
        finally:
            self.moving -= 1
        if isinstance(answer, ErrorReply):
            raise refusal(self.node.where, answer, _CURES)
        return answer

    async def store(self, name: bytes, content: memoryview) -> None:
        """Put the record.

        Raises:
            TierError: It is away, fails or refuses.
        """
        self._check()
        head = encode_head(b"SET", name, nbytes=len(content), after=0)
        async with self.node.connection() as connection:
            answer = await connection.store(head, content, encode_tail(), before=0, timeout_s=self._timeout_s)
        if isinstance(answer, ErrorReply):
            raise refusal(self.node.where, answer, _CURES)

    def close(self) -> None:
        """Close all connections; calls under way fail with TierClosedError."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self.node.close()

    async def wait_closed(self) -> None:
        if self._looking is not None:
            await asyncio.gather(self._looking, return_exceptions=True)
        await self.node.wait_closed()

    def _check(self) -> None:
        if self.away and not self._closed:
            raise TierUnavailableError(f"{self.node.where}: it is away; it is looked for in the background")

    def _lost(self) -> None:
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """Until it answers."""
        retry_s = self._retry_s
        while True:
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, max(MAX_RETRY_S, self._retry_s))
            try:
                await self.node.call(encode(b"PING"), 1)
            except TierError as error:
                logger.debug("still away: %s", error)
            else:
                break
        self._looking = None
        logger.info("%s: it is there again", self.node.where)
