"""Commands to the nodes of keys: short commands in one message per node, records one by one, listing."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.plugins.valkey.connection import refusal
from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode, encode_each
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from lmcache_async.memory.buffer import Buffer
    from lmcache_async.plugins.valkey.connection import Connection
    from lmcache_async.plugins.valkey.node import Node
    from lmcache_async.plugins.valkey.topology import Topology
    from lmcache_async.tiers.base import Allocate

T = TypeVar("T")

MAX_REDIRECTS = 4
"""Most redirects (MOVED, ASK) of a command."""
ASKING = encode(b"ASKING")
SCAN_COUNT = 1000
"""COUNT of a SCAN command: keys that the server examines in one step, which blocks it."""
_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))

Routes: TypeAlias = "dict[tuple[Node, bool], list[int]]"
"""Positions of keys by node and whether ASKING is required."""


class Client:
    """Commands, sent to the nodes of their keys.

    Args:
        topology: Finds the nodes.
        timeout_s: Longest time to transfer one record, in seconds.
    """

    def __init__(self, topology: Topology, *, timeout_s: float) -> None:
        self.topology = topology
        self._timeout_s = timeout_s

    async def ask_each(self, command: bytes, names: Sequence[bytes]) -> list[Reply | TierError]:
        """Send the command for each name, in one message per node, to all nodes concurrently.

        The result of each name of a failed node is the error of the node.

        Raises:
            TierUnavailableError: The nodes are unknown.
        """
        answers: list[Reply | TierError] = [None] * len(names)
        routes: Routes = {}
        for position, node in enumerate(await self.topology.route(names)):
            if isinstance(node, TierError):
                answers[position] = node
            else:
                routes.setdefault((node, False), []).append(position)
        for _ in range(MAX_REDIRECTS):
            if not routes:
                return answers
            routes = await self._ask_nodes(command, names, routes, answers)
        for position in (position for positions in routes.values() for position in positions):
            answers[position] = TierUnavailableError(
                f"the cluster redirected the command {MAX_REDIRECTS} times"
            )
        return answers

    async def fetch(self, name: bytes, allocate: Allocate) -> Buffer | None:
        """Return the value in a buffer from `allocate`; None for a miss.

        Raises:
            TierError: The node failed or refused.
        """

        async def run(connection: Connection, asking: bool) -> Buffer | ErrorReply | None:
            message = (ASKING if asking else b"") + encode(b"GET", name)
            return await connection.fetch(message, allocate, before=int(asking), timeout_s=self._timeout_s)

        return await self._run_at_node(name, run)

    async def store(self, name: bytes, head: bytes, content: memoryview, tail: bytes) -> None:
        """Send a command that sets the value; `head` and `tail` are the parts before and after it.

        Raises:
            TierError: The node failed or refused.
        """

        async def run(connection: Connection, asking: bool) -> Reply:
            message = (ASKING if asking else b"") + head
            return await connection.store(
                message, content, tail, before=int(asking), timeout_s=self._timeout_s
            )

        await self._run_at_node(name, run)

    async def _run_at_node(
        self, name: bytes, run: Callable[[Connection, bool], Awaitable[T | ErrorReply]]
    ) -> T:
        """Run a command on a connection to the name's node, and follow redirects."""
        [node] = await self.topology.route([name])
        asking = False
        for _ in range(MAX_REDIRECTS):
            if isinstance(node, TierError):
                raise node
            try:
                async with node.connection() as connection:
                    answer = await run(connection, asking)
            except TierUnavailableError as error:
                raise self.topology.classify(node, error) from error
            if not isinstance(answer, ErrorReply):
                return answer
            further = self.topology.follow(name, answer)
            if further is None:
                raise refusal(node.where, answer)
            node, asking = further
        raise TierUnavailableError(f"the cluster redirected the command {MAX_REDIRECTS} times")

    async def _ask_nodes(
        self, command: bytes, names: Sequence[bytes], routes: Routes, answers: list[Reply | TierError]
    ) -> Routes:
        """Send the command to all nodes; return the redirected positions by node."""
        if len(routes) == 1:
            [((node, asking), positions)] = routes.items()
            await self._ask_node(command, names, node, asking, positions, answers)
        else:
            async with asyncio.TaskGroup() as group:
                for (node, asking), positions in routes.items():
                    group.create_task(self._ask_node(command, names, node, asking, positions, answers))
        further: Routes = {}
        for (node, _), positions in routes.items():
            for position in positions:
                answer = answers[position]
                if not isinstance(answer, ErrorReply):
                    continue
                home = self.topology.follow(names[position], answer)
                if home is None:
                    answers[position] = refusal(node.where, answer)
                else:
                    further.setdefault(home, []).append(position)
        return further

    async def _ask_node(
        self,
        command: bytes,
        names: Sequence[bytes],
        node: Node,
        asking: bool,
        positions: Sequence[int],
        answers: list[Reply | TierError],
    ) -> None:
        asked = [names[position] for position in positions]
        try:
            if asking:
                message = b"".join(ASKING + encode(command, name) for name in asked)
                replies = (await node.call(message, 2 * len(asked)))[1::2]
            else:
                replies = await node.call(encode_each(command, asked), len(asked))
        except TierError as error:
            classified = self.topology.classify(node, error)
            for position in positions:
                answers[position] = classified
        else:
            for position, reply in zip(positions, replies, strict=True):
                answers[position] = reply


async def scan(topology: Topology, prefix: bytes) -> AsyncGenerator[list[ChunkKey], None]:
    """Yield the keys under the prefix in batches. A key may be yielded twice.

    Raises:
        TierError: A node failed; raised after the other nodes were listed.
    """
    failed: TierError | None = None
    for node in await topology.masters():
        try:
            async with contextlib.aclosing(_scan_node(node, prefix)) as batches:
                async for found in batches:
                    yield found
        except TierError as error:
            failed = error
    if failed is not None:
        raise failed


async def _scan_node(node: Node, prefix: bytes) -> AsyncGenerator[list[ChunkKey], None]:
    """Yield the keys of one node, as `scan`.

    Raises:
        TierError: The server failed.
    """
    cursor = b"0"
    while True:
        cursor, names = await _scan_step(node, cursor, prefix)
        if found := [key for name in names if (key := _key_of(name, prefix)) is not None]:
            yield found
        if cursor == b"0":
            return


def _key_of(name: Reply, prefix: bytes) -> ChunkKey | None:
    """Return the chunk key of a stored name; None for names of other data."""
    if not (isinstance(name, bytes) and name.startswith(prefix) and _HEX.fullmatch(name, len(prefix))):
        return None
    return ChunkKey(bytes.fromhex(name[len(prefix) :].decode("ascii")))


async def _scan_step(node: Node, cursor: bytes, prefix: bytes) -> tuple[bytes, list[Reply]]:
    pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", prefix) + b"*"
    command = encode(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)
    [reply] = await node.call(command, 1)
    if isinstance(reply, ErrorReply):
        raise refusal(node.where, reply)
    match reply:
        case [bytes(after), list(names)]:
            return after, names
    raise TierUnavailableError(f"{node.where} sent an invalid reply to SCAN")
