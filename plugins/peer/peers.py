"""All peers at once: asked together, read from whoever has it, written to whom the key chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from lmcache_async.errors import ChunkCorruptError, TierError, TierPartUnavailableError, TierUnavailableError
from lmcache_async.plugins.peer.peer import Peer
from lmcache_async.plugins.peer.places import Places, rank
from lmcache_async.resp.scanning import scan_node

if TYPE_CHECKING:
    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.peer.config import PeerConfig
    from lmcache_async.resp.dialer import Dialer
    from lmcache_async.resp.wire import Reply
    from lmcache_async.tiers.base import Allocate
    from lmcache_async.types import ChunkKey


class Peers:
    """What the tier asks for, whoever has it.

    Args:
        config: Who they are, and the deadlines.
        dialer: Makes connections.
        places: What is known of who has what.
    """

    def __init__(self, config: PeerConfig, dialer: Dialer, places: Places) -> None:
        self.each = [Peer(endpoint, dialer, config) for endpoint in config.peers]
        self.places = places
        self._names = [str(endpoint) for endpoint in config.peers]

    async def ping(self) -> list[TierError]:
        """Connect to all; why not, of those that do not answer."""
        answers = await self._ask_all(b"EXISTS", [b""])
        return [answer for answer in answers if isinstance(answer, TierError)]

    async def look(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether anybody has each key, of those that answer; it is remembered who.

        Raises:
            TierError: Nobody answers.
        """
        if not keys:
            return []
        answers = await self._ask_all(b"EXISTS", [_name(key) for key in keys])
        told = {peer: answer for peer, answer in enumerate(answers) if not isinstance(answer, TierError)}
        if not told:
            raise _first_error(answers)
        now = _now()
        there: list[bool] = []
        for position, key in enumerate(keys):
            having = [peer for peer, replies in told.items() if replies[position] == 1]
            self.places.note(key, having, now)
            there.append(bool(having) and not self.places.rejected(key))
        return there

    async def fetch(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        """The record from a peer that is known to have it, or from another one if that fails.

        Raises:
            TierError: Those that have it failed.
        """
        failed: TierError | None = None
        tried: set[int] = set()
        while not self.places.rejected(key):
            having = self.places.of(key, _now()) - tried
            if not having:
                break
            peer = self._least_busy(having)
            tried.add(peer)
            try:
                if (buffer := await self.each[peer].fetch(_name(key), allocate)) is not None:
                    return buffer
                self.places.forget(key, peer)
            except ChunkCorruptError:
                raise  # ours: it does not fit into memory
            except TierError as error:
                self.places.forget(key, peer)
                failed = error
        if failed is not None:
            raise self._partial(failed)
        return None

    async def store(self, key: ChunkKey, buffer: Buffer) -> None:
        """Put it to the peer that the key chooses among those that are there.

        Raises:
            TierError: That failed, or all are away.
        """
        for peer in rank(self._names, key):
            if not self.each[peer].away:
                break
        else:
            raise TierUnavailableError("all peers are away")
        await self.each[peer].store(_name(key), buffer.view)
        self.places.accept(key)
        self.places.note(key, {peer, *self.places.of(key, _now())}, _now())

    async def remove(self, keys: Sequence[ChunkKey]) -> int:
        """From all that answer; how many of the keys were there.

        Raises:
            TierError: Nobody answers.
        """
        answers = await self._ask_all(b"UNLINK", [_name(key) for key in keys])
        told = [answer for answer in answers if not isinstance(answer, TierError)]
        for key in keys:
            self.places.note(key, (), _now())
        if keys and not told:
            raise _first_error(answers)
        return sum(any(reply == 1 for reply in replies) for replies in zip(*told, strict=True))

    async def keys(self) -> AsyncIterator[list[ChunkKey]]:
        """Of all peers, in pieces; some come twice.

        Raises:
            TierError: A peer failed; raised when the others are through.
        """
        failed: TierError | None = None
        for peer in self.each:
            try:
                async for piece in scan_node(peer.node):
                    yield piece
            except TierError as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Close all connections; calls under way fail with TierClosedError."""
        for peer in self.each:
            peer.close()

    async def wait_closed(self) -> None:
        for peer in self.each:
            await peer.wait_closed()

    async def _ask_all(self, command: bytes, names: Sequence[bytes]) -> list[list[Reply] | TierError]:
        """The command for each name to each peer, at the same time."""

        async def ask(peer: Peer) -> list[Reply] | TierError:
            try:
                return await peer.ask_each(command, names)
            except TierError as error:
                return error

        if len(self.each) == 1:
            return [await ask(self.each[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(peer)) for peer in self.each]
        return [task.result() for task in tasks]

    def _partial(self, error: TierError) -> TierError:
        """What a peer's failure is to the tier: while others are there it is no reason to leave all of them alone."""
        if isinstance(error, TierUnavailableError) and not all(peer.away for peer in self.each):
            part = TierPartUnavailableError(str(error))
            part.__cause__ = error.__cause__
            return part
        return error

    def _least_busy(self, peers: frozenset[int]) -> int:
        return min(peers, key=lambda peer: (self.each[peer].moving, random.random()))


def _first_error(answers: Sequence[list[Reply] | TierError]) -> TierError:
    return next(answer for answer in answers if isinstance(answer, TierError))


def _name(key: ChunkKey) -> bytes:
    return key.hex().encode()


def _now() -> float:
    return asyncio.get_running_loop().time()
