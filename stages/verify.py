"""Only what is proven to be the chunk asked for goes on."""

from __future__ import annotations

import logging
from concurrent.futures import Executor

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import KVLayout
from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.record import RecordFormat, verify
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.pipeline.batch import FetchedBatch, VerifiedBatch
from lmcache_async.pipeline.threads import in_thread
from lmcache_async.tiers.stack import TierStack

FEW_HEADERS = 32
"""So many headers without payloads take less than the way to a thread and back, a few tenths of a millisecond."""


class VerifyStage:
    """Checks each record's header and, but for records that never left the arena, its checksum.

    A record in doubt ends the prefix, is counted by cause and rejected by its tier, which removes it or puts
    it aside. Records that came from a slower tier are promoted, now that they are proven.
    """

    def __init__(
        self,
        stack: TierStack,
        layout: KVLayout,
        record_format: RecordFormat,
        config: EngineConfig,
        workers: Executor,
        logger: LimitedLogger | None = None,
    ) -> None:
        self._stack = stack
        self._layout = layout
        self._format = record_format
        self._verify_arena = config.retrieve.verify_arena
        self._verify_payload = config.retrieve.verify
        self._promote = config.retrieve.promote
        self._workers = workers
        self._logger = logger or LimitedLogger(logging.getLogger(__name__))

    async def __call__(self, batch: FetchedBatch) -> VerifiedBatch:
        checksums = [self._verify_payload and self._needs_checksum(tier) for tier in batch.tiers]
        count, error = 0, None
        if any(checksums) or len(batch.chunks) > FEW_HEADERS:
            count, error = await in_thread(self._workers, lambda: self._check(batch, checksums))
        else:
            count, error = self._check(batch, checksums)
        if error is not None:
            await self._reject(batch, count, error)
        if self._promote and count:
            items = [
                (chunk.key, buffer)
                for chunk, buffer in zip(batch.chunks[:count], batch.buffers[:count], strict=True)
            ]
            await self._stack.promote(items, batch.tiers[:count])
        return VerifiedBatch(
            request=batch.request,
            chunks=batch.chunks[:count],
            rows=batch.rows[:count],
            scope=batch.scope,
            tiers=batch.tiers[:count],
            cause=batch.cause if error is None else "corrupt",
            buffers=batch.buffers[:count],
        )

    def _needs_checksum(self, tier: int) -> bool:
        return self._verify_arena or not self._stack.tiers[tier].tier.capabilities.in_arena

    def _check(self, batch: FetchedBatch, checksums: list[bool]) -> tuple[int, ChunkCorruptError | None]:
        """How many leading records are proven, and what is wrong with the next one."""
        for index, (chunk, rows, buffer, checksum) in enumerate(
            zip(batch.chunks, batch.rows, batch.buffers, checksums, strict=True)
        ):
            try:
                header = verify(
                    buffer.view,
                    format=self._format,
                    chunk=chunk,
                    request_namespace=batch.request.request_namespace,
                    payload=checksum,
                )
            except ChunkCorruptError as error:
                return index, error.with_traceback(None)  # its frames would keep the slab until a collection
            shape = (len(rows), self._layout.bytes_per_row)
            if header.shape != shape:
                message = f"the record's shape is {header.shape}, not {shape}"
                return index, ChunkCorruptError(message, cause="layout")
        return len(batch.chunks), None

    async def _reject(self, batch: FetchedBatch, index: int, error: ChunkCorruptError) -> None:
        chunk, tier = batch.chunks[index], batch.tiers[index]
        self._logger.report(
            f"corrupt.{error.cause}",
            "tier %r: record %s is not the chunk asked for (%s: %s); rejected, counted as a miss",
            self._stack.tiers[tier].id,
            chunk.key.hex(),
            error.cause,
            error,
        )
        # A promoted copy of the same bytes in another tier is as doubtful: the checksum covers it there.
        await self._stack.discard(tier, chunk.key, error.cause)
