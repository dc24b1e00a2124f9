"""All keys of ours on all nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from lmcache_async.errors import TierError
from lmcache_async.resp.scanning import scan_node

if TYPE_CHECKING:
    from lmcache_async.plugins.valkey.topology import Topology
    from lmcache_async.types import ChunkKey


async def scan(topology: Topology, prefix: bytes) -> AsyncGenerator[list[ChunkKey], None]:
    """The keys under the prefix, in pieces; some may come twice.

    Raises:
        TierError: A node failed; raised when the others are through.
    """
    failed: TierError | None = None
    for node in await topology.masters():
        try:
            async with contextlib.aclosing(scan_node(node, prefix)) as pieces:
                async for found in pieces:
                    yield found
        except TierError as error:
            failed = error
    if failed is not None:
        raise failed
