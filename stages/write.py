"""Write of sealed records to all tiers."""

from __future__ import annotations

from lmcache_async.pipeline.batch import EncryptedBatch, SealedBatch
from lmcache_async.pipeline.report import BatchStored, WriteOutcomes
from lmcache_async.tiers.stack import TierStack


class WriteStage:
    """Writes records to all tiers: tiers in the arena store them immediately, slower tiers queue them.

    The call ends when the records are stored or queued. The `outcomes` of the result are complete when the
    slowest tier has finished.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack

    async def __call__(self, batch: SealedBatch) -> BatchStored:
        outcomes = WriteOutcomes(len(batch.chunks))
        items = [(chunk.key, buffer) for chunk, buffer in zip(batch.chunks, batch.buffers, strict=True)]
        at_rest = batch.at_rest if isinstance(batch, EncryptedBatch) else None
        await self._stack.write(items, outcomes.add, at_rest=at_rest)
        return BatchStored(
            chunks=batch.chunks,
            outcomes=outcomes,
            present=batch.present,
            dropped=batch.drops,
            bytes=sum([buffer.nbytes for buffer in batch.buffers]),
        )
