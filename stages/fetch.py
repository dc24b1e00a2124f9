"""Read of records from their tiers into arena buffers."""

from __future__ import annotations

from lmcache_async.config import EngineConfig
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.pipeline.batch import READ_SHARE, FetchedBatch, PlannedBatch
from lmcache_async.tiers.stack import TierStack


class FetchStage:
    """Reads the records of a batch, each from its tier. The first missing record ends the prefix.

    If a record has left its tier, or the tier fails, slower tiers are tried. A batch in host memory may be larger than
    the memory that is reserved for it, so slower tiers read at most as many of its records as fit in that memory.
    """

    def __init__(self, stack: TierStack, arena: Arena, config: EngineConfig) -> None:
        self._stack = stack
        self._arena = arena
        self._timeout_s = config.retrieve.allocate_timeout_s

    async def __call__(self, batch: PlannedBatch) -> FetchedBatch:
        keys = [chunk.key for chunk in batch.chunks]
        fetched = await self._stack.fetch(
            keys,
            batch.tiers,
            self._allocate,
            slower=not batch.request.waited_for,
            max_slower=max(1, batch.scope.reserved_bytes // self._arena.slab_bytes)
            if batch.in_memory
            else None,
            deadline=batch.scope.earlier(READ_SHARE),
        )
        batch.scope.add(fetched.buffers)
        found, cause = batch.first(len(fetched.buffers)), fetched.cause or batch.cause
        return found.as_type(FetchedBatch, tiers=fetched.tiers, cause=cause, buffers=fetched.buffers)

    async def _allocate(self, nbytes: int) -> Buffer:
        return await self._arena.lease(nbytes, timeout_s=self._timeout_s)
