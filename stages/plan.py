"""Lookup of the longest stored prefix and of the tier that serves each chunk."""

from __future__ import annotations

from lmcache_async.pipeline.batch import LOOKUP_SHARE, HashedBatch, PlannedBatch
from lmcache_async.tiers.stack import TierStack


class PlanStage:
    """Looks up the longest prefix in the tiers, fastest first. The first missing chunk ends it.

    Leading chunks without any row to write are skipped. If the model thread waits for the request, only tiers
    in the arena are looked up.
    """

    per_request = True

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack

    async def __call__(self, batch: HashedBatch) -> PlannedBatch:
        start = next((i for i, rows in enumerate(batch.rows) if (rows >= 0).any()), len(batch.rows))
        keys = [chunk.key for chunk in batch.chunks[start:]]
        tiers, cause = await self._stack.plan(
            keys, in_arena=batch.request.waited_for, deadline=batch.scope.earlier(LOOKUP_SHARE)
        )
        arena = {i for i, each in enumerate(self._stack.tiers) if not each.leaves_memory}
        return batch.as_type(
            PlannedBatch,
            chunks=batch.chunks[start : start + len(tiers)],
            rows=batch.rows[start : start + len(tiers)],
            tiers=tiers,
            cause=cause,
            resident=next((i for i, tier in enumerate(tiers) if tier not in arena), len(tiers)),
        )
