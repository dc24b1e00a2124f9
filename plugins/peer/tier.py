"""Chunks in the daemons of other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Self

from lmcache_async.errors import (
    ChunkCorruptError,
    ConfigError,
    TierClosedError,
    TierError,
)
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.peer.config import PeerConfig
from lmcache_async.plugins.peer.peers import Peers
from lmcache_async.plugins.peer.places import Places
from lmcache_async.resp.access import Credentials
from lmcache_async.resp.dialer import Dialer, RefusedCredentialsError
from lmcache_async.tiers.answers import reads, settle
from lmcache_async.tiers.base import Allocate, Capabilities, Tier, TierStatistics
from lmcache_async.tiers.calls import Calls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
    from types import TracebackType

    from lmcache_async.memory.arena import Arena
    from lmcache_async.types import ChunkKey

logger = logging.getLogger(__name__)


class PeerTier(Tier):
    """Reads what other hosts have in memory; by option it puts each record to one of them, too.

    A lookup asks all peers at once, and it is known for a while who has what. A peer that is away costs
    what it alone has, and no waiting: it is looked for in the background. What a peer gave up meanwhile is
    a miss.

    A put that is cancelled when all of it was sent may still be stored.
    """

    config_type = PeerConfig

    def __init__(self, config: PeerConfig) -> None:
        """Read the files that the config names; nothing is connected to.

        Raises:
            ConfigError: One of them cannot be used.
        """
        super().__init__(config)
        self._config = config
        self._dialer = Dialer(
            Credentials.read(config.username, config.password_file, config.password_variable),
            config.make_tls_context(),
            config.connect_timeout_s,
            kind="peer",
            option="peers",
        )
        self._max_record_bytes: int | None = None
        self._opened: Peers | None = None
        self._corrupt: Counter[str] = Counter()
        self._calls = Calls()

    @property
    def capabilities(self) -> Capabilities:
        writes = self._config.write_to != "none"
        return Capabilities(
            persistent=True,
            writes=writes,
            removes=writes,
            lists=True,
            shared=writes,
            max_concurrency=self._config.connections * len(self._config.peers),
        )

    def bind(self, arena: Arena) -> None:
        """A record fits into a slab: one that is longer is broken."""
        self._max_record_bytes = arena.slab_bytes

    async def contains(self, key: ChunkKey) -> bool:
        return (await self.contains_many([key]))[0]

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """In one message a peer; what only those have that fail is not there, unless all of them fail."""
        with self._call() as peers:
            return await peers.look(keys)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        there = await self.contains_many(keys)
        return there.index(False) if False in there else len(there)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        with self._call() as peers:
            await self._learn(peers, [key])
            return await self._get(peers, key, allocate)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """`get` for each key, from all peers side by side."""
        with reads(len(keys)) as results, self._call() as peers:

            async def one(peers: Peers, position: int) -> None:
                await settle(results, position, self._get(peers, keys[position], allocate))

            await self._learn(peers, keys)
            await self._side_by_side(peers, len(keys), one)
        return results

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        with self._call() as peers:
            await self._put(peers, key, buffer)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        """`put` for each item, to all peers side by side."""
        results: list[TierError | None] = [None] * len(items)

        async def one(peers: Peers, position: int) -> None:
            try:
                await self._put(peers, *items[position])
            except TierError as error:
                results[position] = error

        with self._call() as peers:
            await self._side_by_side(peers, len(items), one)
        return results

    async def remove(self, key: ChunkKey) -> bool:
        with self._call() as peers:
            return self.capabilities.removes and await peers.remove([key]) == 1

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Remove it where that can be done; from here on it is a miss in any case, until it is put again."""
        del cause
        with self._call() as peers:
            peers.places.reject(key)
        return await self.remove(key)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """Of all peers, each once; a peer that fails ends it when the others are through."""
        seen: set[ChunkKey] = set()
        with self._call() as peers:
            async for piece in peers.keys():
                for key in piece:
                    if key not in seen:
                        seen.add(key)
                        yield key

    async def clear(self) -> int:
        """Remove what the tenant has on all peers that answer; nothing where records are only read."""
        if not self.capabilities.removes:
            return 0
        keys = [key async for key in self.keys()]
        with self._call() as peers:
            return await peers.remove(keys) if keys else 0

    def statistics(self) -> TierStatistics:
        """Only what was found broken: how much there is the peers alone know."""
        return TierStatistics(corrupt=self._corrupt.total(), corrupt_by_cause=dict(self._corrupt))

    async def __aenter__(self) -> Self:
        """Open. A peer that cannot be reached now is connected to later.

        Raises:
            ConfigError: A peer refuses user and token.
        """
        places = Places(self._config.remember_keys, self._config.remember_s)
        self._opened = Peers(self._config, self._dialer, places)
        try:
            with self._call() as peers:
                errors = await peers.ping()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        for error in errors:
            if isinstance(error, RefusedCredentialsError):
                await self.__aexit__(None, None, None)
                raise ConfigError(str(error)) from error
            logger.warning("the peer tier begins without a peer: %s", error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. Calls under way end with TierClosedError; content stays."""
        peers = self._peers
        self._opened = None
        peers.close()
        await self._calls.wait_ended()
        await peers.wait_closed()
        await asyncio.sleep(0)  # for sockets whose connects were given up in this turn of the loop

    @property
    def _peers(self) -> Peers:
        if self._opened is None:
            raise TierClosedError("the peer tier is not open")
        return self._opened

    @contextlib.contextmanager
    def _call(self) -> Iterator[Peers]:
        peers = self._peers
        with self._calls.one():
            yield peers

    async def _learn(self, peers: Peers, keys: Sequence[ChunkKey]) -> None:
        """Ask for those of which it is not known who has them: a lookup that was long ago, or none."""
        now = asyncio.get_running_loop().time()
        unknown = [key for key in keys if not peers.places.of(key, now)]
        if unknown:
            await peers.look(unknown)

    async def _get(self, peers: Peers, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        async def fitting(nbytes: int) -> Buffer:
            if self._max_record_bytes is not None and nbytes > self._max_record_bytes:
                raise ChunkCorruptError(
                    f"the record of {key.hex()} has {nbytes} bytes, a slab {self._max_record_bytes}",
                    cause="length",
                )
            return await allocate(nbytes)

        try:
            return await peers.fetch(key, fitting)
        except ChunkCorruptError as error:
            self._corrupt[error.cause] += 1
            peers.places.reject(key)  # a miss, and no hit any more
            if self.capabilities.removes:
                await peers.remove([key])
            return None

    async def _put(self, peers: Peers, key: ChunkKey, buffer: Buffer) -> None:
        if not self.capabilities.writes:
            raise TierError("the peer tier is only read from; set write_to: rendezvous")
        await peers.store(key, buffer)

    async def _side_by_side(
        self, peers: Peers, count: int, one: Callable[[Peers, int], Awaitable[None]]
    ) -> None:
        """`one` for each position, in order, as many at a time as there are connections."""
        left = iter(range(count))

        async def work() -> None:
            for position in left:
                await one(peers, position)

        there = sum(not peer.away for peer in peers.each)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, self._config.connections * max(there, 1))):
                group.create_task(work())
