"""Allocation of arena memory for the records of a batch."""

from __future__ import annotations

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import KVLayout
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.record import RecordFormat
from lmcache_async.pipeline.batch import LeasedBatch, MissingBatch
from lmcache_async.pipeline.report import Drops


class AllocateStage:
    """Leases a buffer for each chunk, within the configured wait. Trailing chunks without a buffer are dropped."""

    def __init__(
        self, arena: Arena, layout: KVLayout, record_format: RecordFormat, config: EngineConfig
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._format = record_format
        self._timeout_s = config.store.allocate_timeout_s

    async def __call__(self, batch: MissingBatch) -> LeasedBatch:
        counts = [*map(len, batch.rows)]
        size_of = {rows: self._format.record_bytes(self._layout.payload_bytes(rows)) for rows in set(counts)}
        sizes = [size_of[count] for count in counts]
        buffers = await self._arena.lease_many(sizes, timeout_s=self._timeout_s)
        batch.scope.add(buffers)
        count = len(buffers)
        drops = batch.drops
        if count < len(sizes):
            drops = Drops(drops)
            drops.add(batch.chunks[count:], "no_room")
        return batch.first(count).as_type(LeasedBatch, drops=drops, buffers=tuple(buffers))
