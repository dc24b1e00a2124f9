"""Copy of records into the paged KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lmcache_async.device.copier import Copier, CopyJob
from lmcache_async.device.layout import KVLayout
from lmcache_async.memory.record import RecordFormat
from lmcache_async.pipeline.batch import RetrieveRequest, VerifiedBatch
from lmcache_async.tiers.stack import TierStack, runs
from lmcache_async.types import BlockIds, RetrieveReport


class HostToDeviceStage:
    """Scatters the payloads of a batch to their rows, in prefix order and never after a missing chunk.

    If the call is cancelled, it first waits for the end of the copy. A load that its caller has abandoned is
    not started.
    """

    ordered = True
    writes_device = True

    def __init__(
        self, copier: Copier, layout: KVLayout, record_format: RecordFormat, stack: TierStack
    ) -> None:
        self._copier = copier
        self._layout = layout
        self._header_bytes = record_format.header_bytes
        self._stack = stack

    async def __call__(self, batch: VerifiedBatch) -> RetrieveReport:
        progress = batch.request.progress if isinstance(batch.request, RetrieveRequest) else None
        if progress is not None and not progress.begin():
            return RetrieveReport(hit_chunks=0, hit_tokens=0, bytes=0, by_tier=Counter(), cause="given_up")
        whole = len(batch.chunks) == len(batch.request.chunks)
        start = self._header_bytes
        jobs = [
            CopyJob(rows, buffer.array_from(start))
            for rows, buffer in zip(batch.rows, batch.buffers, strict=True)
        ]
        if jobs:
            await self._copier.scatter(jobs, batch.request.fence, progress if whole else None)
        tokens = [len(chunk.tokens) for chunk in batch.chunks]
        by_tier: Counter[str] = Counter()
        for tier, first, last in runs(batch.tiers):
            by_tier[self._stack.tiers[tier].id] += sum(tokens[first:last])
        return RetrieveReport(
            hit_chunks=len(tokens),
            hit_tokens=sum(tokens),
            bytes=self._layout.payload_bytes(_count_wanted(batch.rows)),
            by_tier=by_tier,
            cause=batch.cause,
        )


def _count_wanted(rows: Sequence[BlockIds]) -> int:
    """Return the number of rows to write, of all chunks together."""
    return int(np.count_nonzero(np.concatenate(rows) >= 0)) if rows else 0
