"""Commands to the nodes of keys: short commands in one message per node, records one by one, listing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.plugins.valkey.connection import Connection, refusal
from lmcache_async.plugins.valkey.node import Node
from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode, encode_each
from lmcache_async.plugins.valkey.topology import Topology
from lmcache_async.types import KEY_BYTES, ChunkKey

T = TypeVar("T")

MAX_REDIRECTS = 4
"""Most redirects (MOVED, ASK) of a command."""
ASKING = encode(b"ASKING")
SCAN_COUNT = 1000
"""COUNT of a SCAN command: keys that the server examines in one step, which blocks it."""
_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))


async def ask_each(topology: Topology, command: bytes, names: Sequence[bytes]) -> list[Reply | TierError]:
    """Send the command for each name, in one message per node, to all nodes concurrently.

    The result of each name of a failed node is the error of the node. Raise TierError if no node is known.
    """
    answers: list[Reply | TierError] = [None] * len(names)
    routes: dict[tuple[Node, bool], list[int]] = {}  # positions by node and whether ASKING is required

    async def ask(node: Node, asking: bool, positions: Sequence[int]) -> None:
        asked = [names[position] for position in positions]
        replies: Sequence[Reply | TierError]
        try:
            if asking:
                message = b"".join(ASKING + encode(command, name) for name in asked)
                replies = (await node.call(message, 2 * len(asked)))[1::2]
            else:
                replies = await node.call(encode_each(command, asked), len(asked))
        except TierError as error:
            replies = [topology.classify(node, error)] * len(asked)
        for position, reply in zip(positions, replies, strict=True):
            answers[position] = reply

    def redirect(node: Node, position: int) -> None:
        reply = answers[position]
        if isinstance(reply, ErrorReply):
            further = topology.follow(names[position], reply)
            if further is None:
                answers[position] = refusal(node.where, reply)
            else:
                routes.setdefault(further, []).append(position)

    for position, node in enumerate(await topology.route(names)):
        if isinstance(node, TierError):
            answers[position] = node
        else:
            routes.setdefault((node, False), []).append(position)
    for _ in range(MAX_REDIRECTS):
        current, routes = routes, {}
        if len(current) == 1:
            [((node, asking), positions)] = current.items()
            await ask(node, asking, positions)
        else:
            async with asyncio.TaskGroup() as group:
                for (node, asking), positions in current.items():
                    group.create_task(ask(node, asking, positions))
        for (node, _), positions in current.items():
            for position in positions:
                redirect(node, position)
        if not routes:
            return answers
    for position in (position for positions in routes.values() for position in positions):
        answers[position] = _redirected_too_often()
    return answers


async def run_at_node(
    topology: Topology, name: bytes, run: Callable[[Connection], Awaitable[T | ErrorReply]]
) -> T:
    """Run a command for the name on a connection to its node, and follow redirects."""
    [node] = await topology.route([name])
    if isinstance(node, TierError):
        raise node
    asking = False
    for _ in range(MAX_REDIRECTS):
        try:
            async with node.connection() as connection:
                if asking:
                    connection.call(ASKING, 1)  # replied to before the command
                answer = await run(connection)
        except TierUnavailableError as error:
            raise topology.classify(node, error) from error
        if not isinstance(answer, ErrorReply):
            return answer
        further = topology.follow(name, answer)
        if further is None:
            raise refusal(node.where, answer)
        node, asking = further
    raise _redirected_too_often()


def _redirected_too_often() -> TierError:
    return TierUnavailableError(f"the cluster redirected the command {MAX_REDIRECTS} times")


async def scan(topology: Topology, prefix: bytes) -> AsyncGenerator[list[ChunkKey], None]:
    """Yield the keys under the prefix in batches. A key may be yielded twice.

    If a node fails, TierError is raised after the other nodes were listed.
    """
    failed: TierError | None = None
    for node in await topology.masters():
        cursor: bytes | None = None
        while cursor != b"0":
            try:
                cursor, found = await _scan_step(node, cursor or b"0", prefix)
            except TierError as error:
                failed = error
                break
            yield found
    if failed is not None:
        raise failed


async def _scan_step(node: Node, cursor: bytes, prefix: bytes) -> tuple[bytes, list[ChunkKey]]:
    pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", prefix) + b"*"
    command = encode(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_COUNT)
    match await node.call(command, 1):
        case [ErrorReply() as reply]:
            raise refusal(node.where, reply)
        case [[bytes(after), list(names)]]:
            return after, [key for name in names if (key := _key_of(name, prefix)) is not None]
    raise TierUnavailableError(f"{node.where} sent an invalid reply to SCAN")


def _key_of(name: Reply, prefix: bytes) -> ChunkKey | None:
    """Return the chunk key of a stored name; None for names of other data."""
    if not (isinstance(name, bytes) and name.startswith(prefix) and _HEX.fullmatch(name, len(prefix))):
        return None
    return ChunkKey(bytes.fromhex(name[len(prefix) :].decode("ascii")))
