"""The keys of ours on one server."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from lmcache_async.errors import TierUnavailableError
from lmcache_async.resp.answers import refusal
from lmcache_async.resp.wire import ErrorReply, Reply, encode
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from lmcache_async.resp.node import Node

_STEP = 1000
"""Keys that the server looks at in one step; nothing else runs there meanwhile."""
_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))


async def scan_node(node: Node, prefix: bytes = b"") -> AsyncGenerator[list[ChunkKey], None]:
    """The keys under the prefix, in pieces; some may come twice.

    Raises:
        TierError: The server failed.
    """
    cursor = b"0"
    while True:
        cursor, names = await _step(node, cursor, prefix)
        if found := [key for name in names if (key := key_of(name, prefix)) is not None]:
            yield found
        if cursor == b"0":
            return


def key_of(name: Reply, prefix: bytes) -> ChunkKey | None:
    """The key that a name is of; None where it is none of ours."""
    if not (isinstance(name, bytes) and name.startswith(prefix) and _HEX.fullmatch(name, len(prefix))):
        return None
    return ChunkKey(bytes.fromhex(name[len(prefix) :].decode("ascii")))


async def _step(node: Node, cursor: bytes, prefix: bytes) -> tuple[bytes, list[Reply]]:
    pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", prefix) + b"*"
    command = encode(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _STEP)
    [reply] = await node.call(command, 1)
    if isinstance(reply, ErrorReply):
        raise refusal(node.where, reply)
    match reply:
        case [bytes(after), list(names)]:
            return after, names
    raise TierUnavailableError(f"{node.where} answered SCAN with something else")
