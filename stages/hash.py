"""Splitting of tokens into chunks, with their keys."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import KVLayout
from lmcache_async.hashing import ChunkHasher, Namespace
from lmcache_async.memory.threads import in_thread
from lmcache_async.pipeline.batch import HashedBatch, Request, StoreRequest
from lmcache_async.types import BlockIds, Chunk


class HashStage:
    """Divides the tokens of a request into chunks with chained keys, and its rows accordingly.

    A request that contains chunks is passed on unchanged. Long prompts are hashed on a worker thread.
    """

    per_request = True
    _INLINE_TOKENS = 16_384  # up to this length a thread hop takes longer than hashing

    def __init__(
        self, namespace: Namespace, layout: KVLayout, workers: Executor, config: EngineConfig
    ) -> None:
        self._namespace = namespace
        self._layout = layout
        self._workers = workers
        self._partial_chunks = config.store.partial_chunks

    async def __call__(self, request: Request) -> HashedBatch:
        if request.chunks or not len(request.tokens):
            return HashedBatch(request=request, chunks=request.chunks, rows=request.rows)
        if len(request.tokens) <= self._INLINE_TOKENS:
            chunks = self._hash(request)
        else:  # a copy, because the caller may change its array while the thread reads
            copied = replace(request, tokens=request.tokens.copy())
            chunks = await in_thread(self._workers, lambda: self._hash(copied))
        return HashedBatch(request=request, chunks=chunks, rows=self._rows(request, chunks))

    def _hash(self, request: Request) -> tuple[Chunk, ...]:
        hasher = ChunkHasher(
            request.root or self._namespace.root(),
            chunk_size=self._namespace.chunk_size,
            algorithm=self._namespace.algorithm,
            hash_key=self._namespace.hash_key,
        )
        whole_rows = len(request.tokens) - len(request.tokens) % self._layout.tokens_per_row
        chunks = hasher.extend(request.tokens[:whole_rows])
        tail = hasher.tail()
        # The setting only applies to stores; a retrieve always looks up the partial chunk.
        if tail is not None and (self._partial_chunks or not isinstance(request, StoreRequest)):
            chunks.append(tail)
        return tuple(chunks)

    def _rows(self, request: Request, chunks: tuple[Chunk, ...]) -> tuple[BlockIds, ...]:
        """Return the rows of each chunk. All chunks but the last have the same length."""
        if not chunks:
            return ()
        count = len(chunks[0].tokens) // self._layout.tokens_per_row
        first = chunks[0].start // self._layout.tokens_per_row
        last = first + count * (len(chunks) - 1)
        end = last + len(chunks[-1].tokens) // self._layout.tokens_per_row
        whole = request.row_ids[first:last].reshape(-1, count)
        return (*whole, request.row_ids[last:end])
