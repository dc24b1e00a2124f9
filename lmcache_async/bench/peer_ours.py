"""Our engine through the peers' workload, by its default settings and with one copying thread."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lmcache_async.bench import peer_work
from lmcache_async.bench.cache import PromptCache
from lmcache_async.bench.loop import Batches
from lmcache_async.hashing import ChunkHasher, RequestNamespace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from lmcache_async.bench.peer_work import Workload
    from lmcache_async.engine.engine import CacheEngine

Seconds: TypeAlias = "Callable[[], Awaitable[float]]"
"""Does a task once, and says what it took."""

_BATCH = 16  # chunks of a batch: as many as one holds of records of 2 MiB
_ROOT = b"benchmark of key"


async def hashing(work: Workload) -> AsyncIterator[dict[str, Seconds]]:
    def seconds(tokens: Any) -> Seconds:
        async def run() -> float:
            start = time.perf_counter()
            ChunkHasher(_ROOT, chunk_size=work.form.chunk_size).extend_keys(tokens)
            return time.perf_counter() - start

        return run

    yield {
        peer_work.HASH_LIST: seconds(work.prompt.tolist()),
        peer_work.HASH_ARRAY: seconds(work.prompt),
    }


async def copying(work: Workload) -> AsyncIterator[dict[str, Seconds]]:
    cache = PromptCache.of(work.form)
    async with cache.open(copy_threads=1) as engine:
        yield _moves(cache, engine, peer_work.STORE, peer_work.RETRIEVE)


async def bookkeeping(work: Workload) -> AsyncIterator[dict[str, Seconds]]:
    cache = PromptCache.of(work.small)
    # Lookups may pin a quarter of the arena: as a peer's, they are to pin all of the prompt.
    async with Batches(cache, _BATCH).open(**{"arena.max_bytes": 4 * cache.arena_bytes}) as engine:
        yield {
            **_moves(cache, engine, peer_work.STORE_NOTHING, peer_work.RETRIEVE_NOTHING),
            **_lookups(cache, engine),
        }


GROUPS = tuple(map(contextlib.asynccontextmanager, (hashing, copying, bookkeeping)))
"""Tasks that share an engine; one is open at any time."""


def _moves(
    cache: PromptCache, engine: CacheEngine, store_name: str, retrieve_name: str
) -> dict[str, Seconds]:
    async def store() -> float:
        await engine.clear()
        start = time.perf_counter()
        await cache.store(engine)
        return time.perf_counter() - start

    async def retrieve() -> float:
        await cache.ensure_stored(engine)
        start = time.perf_counter()
        await cache.retrieve(engine)
        return time.perf_counter() - start

    return {store_name: store, retrieve_name: retrieve}


def _lookups(cache: PromptCache, engine: CacheEngine) -> dict[str, Seconds]:
    """Both from tokens: a peer's lookup hashes them too."""
    root = RequestNamespace().root(cache.namespace.root(), cache.namespace.algorithm, b"")
    tokens = cache.tokens.astype(np.int64)

    async def lookup() -> float:
        await cache.ensure_stored(engine)
        start = time.perf_counter()
        found = await engine.lookup(tokens)
        return _checked(start, found, len(tokens))

    async def pinned() -> float:
        await cache.ensure_stored(engine)
        start = time.perf_counter()
        keys = ChunkHasher(root, chunk_size=cache.form.chunk_size).extend_keys(tokens)
        result = await engine.lookup_keys(keys, lookup_id="benchmark")
        engine.unpin("benchmark")
        return _checked(start, result.pinned, cache.num_chunks)

    return {peer_work.LOOKUP: lookup, peer_work.LOOKUP_PINNED: pinned}


def _checked(start: float, found: int, expected: int) -> float:
    """Seconds since `start`, for an answer that is right."""
    seconds = time.perf_counter() - start
    if found != expected:
        raise RuntimeError(f"{found} of {expected} were there")
    return seconds
