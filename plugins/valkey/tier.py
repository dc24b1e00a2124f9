"""The valkey tier: records in Valkey or Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from lmcache_async.errors import (
    ConfigError,
    TierError,
    TierUnavailableError,
)
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.valkey.config import ValkeyConfig, make_tls_context, read_auth
from lmcache_async.plugins.valkey.connection import Connection, ConnectionSettings, Node, RefusedLoginError
from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode, encode_around
from lmcache_async.plugins.valkey.topology import Topology, make_topology
from lmcache_async.tiers.base import Allocate, Capabilities
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.results import read_results, result_of, run_each
from lmcache_async.types import ChunkKey

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ValkeyTier(BundledTier[ValkeyConfig, Topology]):
    """Stores each record as one string, named by the prefix and the key in hex.

    Records that the server evicts, expires or loses are misses. If the server is full, a put fails with
    TierFullError. A server that cannot be reached when the tier is opened is connected to later. In a
    cluster, a failed node affects only its own keys.

    A put that is cancelled after the whole command was sent may still store its record.
    """

    config_type = ValkeyConfig

    def __init__(self, config: ValkeyConfig) -> None:
        """Read the files that the config names, without connecting.

        Raises:
            ConfigError: One of them cannot be used.
        """
        super().__init__(config, "valkey tier")
        self._prefix = config.key_prefix.encode()
        self._expiry = () if config.ttl_s is None else (b"PX", b"%d" % max(1, round(config.ttl_s * 1000)))
        tls = make_tls_context(config)
        self._settings = ConnectionSettings(config, read_auth(config), tls)
        self._sentinel_settings = ConnectionSettings(
            config, read_auth(config, "sentinel_"), tls, kind="sentinel"
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            persistent=True,
            removes=True,
            lists=True,
            shared=True,
        )

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Look up the keys, in one message per node. Keys of a failed node are misses; if all keys fail, raise TierError."""
        with self._call() as topology:
            answers = await topology.ask_each(b"EXISTS", [self._name(key) for key in keys])
        errors = [answer for answer in answers if isinstance(answer, TierError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return [answer == 1 for answer in answers]

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """Get each key; nodes fail independently of each other."""
        with read_results(len(keys)) as results, self._call() as topology:

            async def one(position: int) -> None:
                results[position] = await result_of("get", self._get(topology, keys[position], allocate))

            await self._by_node(topology, keys, results, one)
        return results

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        results: list[TierError | None] = [None] * len(items)
        with self._call() as topology:

            async def one(position: int) -> None:
                results[position] = await result_of("put", self._put(topology, *items[position]))

            await self._by_node(topology, [key for key, _ in items], results, one)
        return results

    async def remove(self, key: ChunkKey) -> bool:
        with self._call() as topology:
            [answer] = await topology.ask_each(b"UNLINK", [self._name(key)])
        if isinstance(answer, TierError):
            raise answer
        return answer == 1

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """Yield the keys under the prefix, from all nodes. Raise TierError at the end if a node failed."""
        seen: set[ChunkKey] = set()
        # Not a call that closing waits for: the consumer may stop the iteration at any point.
        async with contextlib.aclosing(self._usable().scan(self._prefix)) as batches:
            async for found in batches:
                for key in found:
                    if key not in seen:
                        seen.add(key)
                        yield key

    async def clear(self) -> int:
        """Remove all keys under the prefix; other keys stay."""
        removed = 0
        with self._call() as topology:
            async with contextlib.aclosing(topology.scan(self._prefix)) as batches:
                async for found in batches:
                    answers = await topology.ask_each(b"UNLINK", [self._name(key) for key in found])
                    for answer in answers:
                        if isinstance(answer, TierError):
                            raise answer
                        removed += answer == 1
        return removed

    async def __aenter__(self) -> Self:
        """Open. A server that cannot be reached is connected to later.

        Raises:
            ConfigError: The server refuses the user, the password or the database.
        """
        self._open(make_topology(self._settings, self._sentinel_settings))
        try:
            with self._call() as topology:
                [answer] = await topology.ask_each(b"EXISTS", [self._prefix])
        except TierError as error:
            answer = error
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        if isinstance(answer, RefusedLoginError):
            await self.__aexit__(None, None, None)
            raise ConfigError(str(answer)) from answer
        if isinstance(answer, TierError):
            is_away = isinstance(answer, TierUnavailableError)
            end = "its server can be reached" if is_away else "the cause is corrected"
            logger.warning("the valkey tier misses every chunk until %s: %s", end, answer)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close. Calls under way end with TierClosedError; content stays."""
        topology = self._usable()
        topology.close()
        await self._end_calls()
        await topology.wait_closed()
        await asyncio.sleep(0)  # for sockets whose connects were cancelled in this iteration of the loop

    def _name(self, key: ChunkKey) -> bytes:
        return self._prefix + key.hex().encode()

    async def _get(self, topology: Topology, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        name = self._name(key)
        # Before a connection is reserved: writes, which give memory back, need the connections too.
        buffer = await allocate(self._bound().slab_bytes)

        def run(connection: Connection) -> Awaitable[int | ErrorReply | None]:
            return connection.fetch(encode(b"GET", name), buffer)

        with contextlib.ExitStack() as undo:
            undo.callback(buffer.release)
            length = await topology.run_at_node(name, run)
            if length is None:
                return None
            if not 0 < length <= buffer.nbytes:  # after its deletion, later lookups are misses too
                await self._reject_length(key, partial(topology.ask_each, b"UNLINK", [name]), length)
                return None
            buffer.resize(length)
            undo.pop_all()
        return buffer

    async def _put(self, topology: Topology, key: ChunkKey, buffer: Buffer) -> None:
        name = self._name(key)
        head, tail = encode_around((b"SET", name), buffer.nbytes, self._expiry)

        def run(connection: Connection) -> Awaitable[Reply]:
            return connection.store(head, buffer.view, tail)

        reply = await topology.run_at_node(name, run)
        if reply != b"OK":
            raise TierUnavailableError(
                f"the reply to the write of key {key.hex()} is {reply!r:.100}, expected OK"
            )

    async def _by_node(
        self,
        topology: Topology,
        keys: Sequence[ChunkKey],
        results: list[T | TierError | None],
        one: Callable[[int], Awaitable[None]],
    ) -> None:
        """Run `one` for each position, with as many concurrent calls per node as it has connections.

        Each record is routed again right before its transfer, because its node may have failed or changed meanwhile.
        """
        by_node: dict[Node, list[int]] = {}
        nodes: Sequence[Node | TierError]
        try:
            nodes = await topology.route([self._name(key) for key in keys])
        except TierUnavailableError as error:
            nodes = [error] * len(keys)
        for position, node in enumerate(nodes):
            if isinstance(node, TierError):
                results[position] = node
            else:
                by_node.setdefault(node, []).append(position)

        at_once = self.config.connections
        if len(by_node) == 1:
            [positions] = by_node.values()
            await run_each(positions, one, min(len(positions), at_once))
            return
        async with asyncio.TaskGroup() as group:
            for positions in by_node.values():
                group.create_task(run_each(positions, one, min(len(positions), at_once)))
