"""Selection of the chunks to store."""

from __future__ import annotations

import numpy as np

from lmcache_async.memory.arena import Arena
from lmcache_async.pipeline.batch import LOOKUP_SHARE, HashedBatch, MissingBatch
from lmcache_async.pipeline.report import Drops
from lmcache_async.tiers.stack import TierStack


class LookupStage:
    """Keeps the chunks that some tier lacks; counts the others as present.

    Chunks with a masked row (-1) cannot be stored and are dropped.

    The first chunks of a prompt fill host memory, and further chunks would only evict their own prefix from it.
    Therefore further chunks are stored in slower tiers only, and count as present if these tiers have them. Without
    slower tiers they are dropped before the copy.
    """

    per_request = True

    def __init__(self, stack: TierStack, arena: Arena) -> None:
        self._stack = stack
        self._num_slabs = arena.num_slabs
        self._slab_bytes = arena.slab_bytes

    async def __call__(self, batch: HashedBatch) -> MissingBatch:
        chunks, drops = batch.chunks, Drops(batch.drops)
        most = self._memory_chunks()
        if all(stacked.writer is None for stacked in self._stack.tiers) and len(chunks) > most:
            drops.add(chunks[most:], "larger_than_memory")
            chunks = chunks[:most]
        keys = [chunk.key for chunk in chunks]
        missing = await self._stack.missing(
            keys, memory_chunks=most, deadline=batch.scope.earlier(LOOKUP_SHARE)
        )
        present = len(chunks) - len(missing)
        rows = batch.rows[: len(chunks)]
        if missing and np.concatenate([rows[i] for i in missing]).min(initial=0) < 0:
            masked = {i: chunks[i] for i in missing if (rows[i] < 0).any()}
            drops.add([*masked.values()], "masked")
            missing = [i for i in missing if i not in masked]
        if len(missing) < len(chunks):
            chunks, rows = tuple(chunks[i] for i in missing), tuple(rows[i] for i in missing)
        return batch.as_type(MissingBatch, chunks=chunks, rows=rows, drops=drops, present=present)

    def _memory_chunks(self) -> int:
        """Return the maximum number of chunks of one prompt in host memory."""
        tiers = [stacked.tier for stacked in self._stack.tiers if not stacked.leaves_memory]
        limits = [max_bytes for tier in tiers if (max_bytes := tier.statistics().max_bytes) is not None]
        if len(limits) < max(len(tiers), 1):  # no limit but the arena
            return self._num_slabs
        return min(self._num_slabs, -(-max(limits) // self._slab_bytes))
