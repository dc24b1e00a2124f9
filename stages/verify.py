"""Verification of fetched records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import KVLayout
from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.record import RecordFormat, is_sealed, verify
from lmcache_async.memory.threads import in_thread
from lmcache_async.pipeline.batch import FetchedBatch, VerifiedBatch
from lmcache_async.tiers.stack import TierStack
from lmcache_async.types import Chunk

SHARE_BYTES = 8 << 20
"""Bytes per additional thread: a thread hop takes about 50 µs, reading 8 MiB about 0.5 ms."""

Checked: TypeAlias = "tuple[int, ChunkCorruptError | None]"
"""Number of leading records of a batch that are valid, and the error of the next one."""

FEW_HEADERS = 128
"""Maximum number of headers checked on the loop if no payload is read. A header takes about 2 µs, a thread hop
and back a few tenths of a millisecond."""


class VerifyStage:
    """Verifies the header of each record, and its checksum unless the record never left the arena (configurable).

    A record that fails ends the prefix, is counted by cause and is rejected by its tier, which deletes or
    quarantines it. Verified records that came from a slower tier are promoted.
    """

    def __init__(
        self,
        stack: TierStack,
        layout: KVLayout,
        record_format: RecordFormat,
        config: EngineConfig,
        workers: Executor,
    ) -> None:
        self._stack = stack
        self._layout = layout
        self._format = record_format
        self._verify_arena = config.retrieve.verify_arena
        self._verify_payload = config.retrieve.verify
        self._promote = config.retrieve.promote
        self._workers = workers
        self._threads = config.copy_threads

    async def __call__(self, batch: FetchedBatch) -> VerifiedBatch:
        needs = {tier: self._verify_payload and self._needs_checksum(tier) for tier in set(batch.tiers)}
        checksums = [needs[tier] for tier in batch.tiers]
        if any(checksums) or len(batch.chunks) > FEW_HEADERS:
            count, error = await self._check_in_threads(batch, checksums)
        else:
            count, error = self._check(batch, checksums, 0, len(batch.chunks))
        if error is not None:
            # A promoted copy of the same bytes in another tier is detected there by its checksum.
            key = batch.chunks[count].key
            await self._stack.reject(batch.tiers[count], key, error, "is not the requested chunk")
        if self._promote and any(batch.tiers[:count]):  # there is a faster tier than the one read from
            items = [
                (chunk.key, buffer)
                for chunk, buffer in zip(batch.chunks[:count], batch.buffers[:count], strict=True)
            ]
            await self._stack.promote(items, batch.tiers[:count])
        return batch.first(count).as_type(VerifiedBatch, cause="corrupt" if error else batch.cause)

    def _needs_checksum(self, tier: int) -> bool:
        return self._verify_arena or not self._stack.tiers[tier].tier.capabilities.in_arena

    async def _check_in_threads(self, batch: FetchedBatch, checksums: Sequence[bool]) -> Checked:
        """Check the records, in several threads if there is much to read."""
        sums = sum(buffer.nbytes for buffer, wanted in zip(batch.buffers, checksums, strict=True) if wanted)
        count = len(batch.chunks)
        shares = max(min(self._threads, count, sums // SHARE_BYTES), 1)
        edges = pairwise([count * share // shares for share in range(shares + 1)])
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(in_thread(self._workers, partial(self._check, batch, checksums, *edge)))
                for edge in edges
            ]
        checked = [task.result() for task in tasks]
        return next((each for each in checked if each[1] is not None), checked[-1])

    def _check(self, batch: FetchedBatch, checksums: Sequence[bool], start: int, stop: int) -> Checked:
        """Return the index of the first invalid record, else `stop`, and its error."""
        namespace, row_bytes = batch.request.request_namespace, self._layout.bytes_per_row
        header_bytes = self._format.header_bytes
        for index in range(start, stop):
            buffer, chunk, payload = batch.buffers[index], batch.chunks[index], checksums[index]
            shape = (len(batch.rows[index]), row_bytes)
            if not is_sealed(
                buffer.read(header_bytes),
                buffer.view[header_bytes:] if payload else None,
                format=self._format,
                chunk=chunk,
                request_namespace=namespace,
                shape=shape,
                payload_bytes=buffer.nbytes - header_bytes,
            ):
                error = self._fault(buffer.view, chunk, namespace, shape, payload=payload)
                if error is not None:
                    return index, error
        return stop, None

    def _fault(
        self, view: memoryview, chunk: Chunk, namespace: str, shape: tuple[int, int], *, payload: bool
    ) -> ChunkCorruptError | None:
        """Return the error of a record that is not exactly what `seal` writes; None if it is valid."""
        try:
            header = verify(
                view, format=self._format, chunk=chunk, request_namespace=namespace, payload=payload
            )
        except ChunkCorruptError as error:
            return error.with_traceback(None)  # its frames would keep the slab in use
        if header.shape != shape:
            message = f"the record's shape is {header.shape}, not {shape}"
            return ChunkCorruptError(message, cause="layout")
        return None  # valid, but encoded differently by another version
