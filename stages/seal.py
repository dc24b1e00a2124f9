"""Sealing of payloads into records: header and checksum."""

from __future__ import annotations

from concurrent.futures import Executor

from lmcache_async.device.layout import KVLayout
from lmcache_async.memory.record import RecordFormat, payload_checksum
from lmcache_async.memory.threads import in_thread
from lmcache_async.pipeline.batch import FilledBatch, SealedBatch

FEW_HEADERS = 16
"""Maximum number of headers written on the loop if the checksums are known: faster than a thread hop and
back."""


class SealStage:
    """Writes the header of each record with the checksum of its payload. At most one worker thread call per batch."""

    def __init__(self, record_format: RecordFormat, layout: KVLayout, workers: Executor) -> None:
        self._format = record_format
        self._layout = layout
        self._workers = workers

    async def __call__(self, batch: FilledBatch) -> SealedBatch:
        if batch.checksums and len(batch.chunks) <= FEW_HEADERS:
            self._seal(batch)
        elif batch.chunks:
            await in_thread(self._workers, lambda: self._seal(batch))
        return batch.as_type(SealedBatch)

    def _seal(self, batch: FilledBatch) -> None:
        header_bytes, row_bytes = self._format.header_bytes, self._layout.bytes_per_row
        template, request_namespace = self._format.template, batch.request.request_namespace
        checksums = batch.checksums or [
            payload_checksum(buffer.view[header_bytes:]) for buffer in batch.buffers
        ]
        for chunk, rows, buffer, checksum in zip(
            batch.chunks, batch.rows, batch.buffers, checksums, strict=True
        ):
            shape = len(rows), row_bytes
            header = template(chunk, request_namespace, shape, buffer.nbytes - header_bytes)
            buffer.write(header.header(chunk, checksum))
