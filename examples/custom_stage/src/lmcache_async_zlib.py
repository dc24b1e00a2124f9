"""Two stages in their own distribution: compress records for slower tiers, and decompress them after a read.

A compressed record is sealed over its compressed payload, so tiers verify it like any other record. Its shape has a third
number: for an engine without `unzlib` it is a record of another layout, which is a miss.
"""

import zlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lmcache_async import Buffer, ChunkCorruptError, EngineConfig, KVLayout
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.header import read_header
from lmcache_async.memory.record import RecordFormat, seal, verify
from lmcache_async.memory.threads import in_thread
from lmcache_async.pipeline.batch import EncryptedBatch, FetchedBatch, SealedBatch
from lmcache_async.tiers.stack import TierStack

Bytes = NDArray[np.uint8]
LEVEL = 1
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class CompressStage:
    """Runs between `seal` and `write`: makes a compressed copy of each record for the tiers outside of the arena."""

    def __init__(
        self,
        stack: TierStack,
        arena: Arena,
        workers: Executor,
        config: EngineConfig,
        record_format: RecordFormat,
    ) -> None:
        self._stack, self._arena, self._workers, self._format = stack, arena, workers, record_format
        self._timeout_s = config.store.allocate_timeout_s

    async def __call__(self, batch: SealedBatch) -> EncryptedBatch:
        sizes = [buffer.nbytes for buffer in batch.buffers] if self._stack.leaves_memory else []
        copies = await self._arena.lease_many(sizes, timeout_s=self._timeout_s)
        batch.scope.add(copies)
        lengths = await in_thread(self._workers, lambda: self._compress(batch, copies)) if copies else []
        for copy, length in zip(copies, lengths, strict=True):
            copy.resize(length)
        return batch.as_type(EncryptedBatch, at_rest=tuple(copies))

    def _compress(self, batch: SealedBatch, copies: Sequence[Buffer]) -> list[int]:
        """Write the compressed records and return their lengths. A record that would grow is copied unchanged."""
        lengths = []
        for chunk, record, copy in zip(batch.chunks, batch.buffers, copies, strict=False):
            start = self._format.header_bytes
            packed = zlib.compress(shuffled(record.array[start:], self._format.dtype), LEVEL)
            if start + len(packed) >= record.nbytes:
                copy.view[:] = record.view
                lengths.append(record.nbytes)
                continue
            copy.view[start : start + len(packed)] = packed
            seal(
                copy.view,
                format=self._format,
                chunk=chunk,
                request_namespace=batch.request.request_namespace,
                shape=(*read_header(record.view).shape, len(packed)),
                payload_bytes=len(packed),
            )
            lengths.append(start + len(packed))
        return lengths


class DecompressStage:
    """Runs between `fetch` and `verify`: decompresses records; the first invalid one ends the prefix."""

    def __init__(
        self,
        stack: TierStack,
        arena: Arena,
        workers: Executor,
        config: EngineConfig,
        record_format: RecordFormat,
        layout: KVLayout,
    ) -> None:
        self._stack, self._arena, self._workers, self._format = stack, arena, workers, record_format
        self._layout = layout
        self._timeout_s = config.retrieve.timeout_s

    async def __call__(self, batch: FetchedBatch) -> FetchedBatch:
        packed = [i for i, buffer in enumerate(batch.buffers) if self._is_compressed(buffer)]
        sizes = [self._format.record_bytes(self._layout.payload_bytes(len(batch.rows[i]))) for i in packed]
        plain = await self._arena.lease_many(sizes, timeout_s=self._timeout_s) if sizes else []
        batch.scope.add(plain)
        bad = (
            await in_thread(self._workers, lambda: self._decompress(batch, packed, plain)) if plain else None
        )
        buffers = list(batch.buffers)
        for index, buffer in zip(packed, plain, strict=False):
            buffers[index] = buffer
        count, cause = len(buffers), batch.cause
        if bad is not None:
            count, cause = bad, "corrupt"
            await self._stack.discard(batch.tiers[count], batch.chunks[count].key, "compression")
        elif len(plain) < len(packed):
            count, cause = packed[len(plain)], "no_room"
        return replace(batch, buffers=tuple(buffers), cause=cause).first(count)

    def _is_compressed(self, record: Buffer) -> bool:
        try:
            return len(read_header(record.view).shape) == 3
        except ChunkCorruptError:
            return False  # `verify` reports and rejects it

    def _decompress(self, batch: FetchedBatch, packed: Sequence[int], plain: Sequence[Buffer]) -> int | None:
        """Return the position of the first invalid record; None if all are valid."""
        namespace = batch.request.request_namespace
        for index, buffer in zip(packed, plain, strict=False):
            record, chunk, start = batch.buffers[index].view, batch.chunks[index], self._format.header_bytes
            try:
                header = verify(record, format=self._format, chunk=chunk, request_namespace=namespace)
                payload = inflated(record[start:], buffer.nbytes - start)
            except (ChunkCorruptError, zlib.error):
                return index
            buffer.array[start:] = unshuffled(payload, self._format.dtype)
            seal(
                buffer.view,
                format=self._format,
                chunk=chunk,
                request_namespace=namespace,
                shape=header.shape[:2],
                payload_bytes=buffer.nbytes - start,
            )
        return None


def shuffled(payload: Bytes, dtype: str) -> bytes:
    """Return the first bytes of all numbers, then all second bytes, and so on: exponents are similar and compress well."""
    return np.ascontiguousarray(payload.reshape(-1, item_bytes(payload, dtype)).T).tobytes()


def unshuffled(payload: bytes, dtype: str) -> Bytes:
    flat = np.frombuffer(payload, np.uint8)
    return flat.reshape(item_bytes(flat, dtype), -1).T.reshape(-1)


def item_bytes(payload: Bytes, dtype: str) -> int:
    size = ITEM_BYTES.get(dtype.removeprefix("torch."), 1)
    return size if payload.nbytes % size == 0 else 1


def inflated(packed: memoryview, nbytes: int) -> bytes:
    """Return the payload of exactly `nbytes` bytes, without ever using more memory than that."""
    inflater = zlib.decompressobj()
    payload = inflater.decompress(packed, nbytes)
    if len(payload) != nbytes or not inflater.eof:
        raise zlib.error(f"{len(payload)} bytes or more; expected {nbytes}")
    return payload
