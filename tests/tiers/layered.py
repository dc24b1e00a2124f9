"""What tests of layers share: a context, and chunks as plain bytes."""

from __future__ import annotations

import logging

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.tiers.base import Allocate
from lmcache_async.tiers.layers.base import LayerContext, Shared
from lmcache_async.types import ChunkKey

PAGE = 4096


def context(*, timeout_s: float = 30.0, tier: str = "t", layer: str = "l", shared: Shared | None = None):
    return LayerContext(
        tier=tier,
        layer=layer,
        timeout_s=timeout_s,
        logger=LimitedLogger(logging.getLogger("test")),
        shared=shared or Shared(),
        where=f"tiers[0] ({tier}), layers[0] ({layer})",
    )


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "big"))


def content(number: int, nbytes: int = 1000) -> bytes:
    return bytes((number + index) % 251 for index in range(nbytes))


def chunk(arena: Arena, number: int) -> Buffer:
    """A leased buffer with that chunk's content."""
    data = content(number)
    buffer = arena.lease_nowait(len(data))
    assert buffer is not None
    buffer.view[:] = data
    return buffer


def allocator(arena: Arena) -> Allocate:
    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=1)

    return allocate


def taken(result: object) -> bytes:
    """The content of a buffer that a get gave, whose lease ends here."""
    assert isinstance(result, Buffer), result
    with result:
        return bytes(result.view)
