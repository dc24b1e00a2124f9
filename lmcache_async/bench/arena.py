"""Store and retrieve in host memory, of a cache as a large model has it, beside memcpy of the same bytes.

The first limit copies the same rows between the same places: rows of the paged cache, in its order of blocks,
and records of a second arena made like the engine's. Its addresses are computed before the clock starts. The
second copies as many bytes in larger pieces: of each record all rows of a layer at once.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lmcache_async.bench.cache import CacheForm, PromptCache
from lmcache_async.bench.frame import Case, option
from lmcache_async.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from lmcache_async.bench.frame import Frame, Probe, Row
    from lmcache_async.engine.engine import CacheEngine

Bytes: TypeAlias = npt.NDArray[np.uint8]
Pairs: TypeAlias = "list[tuple[Bytes, Bytes]]"

UNIT = "GB/s"
_PREPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """A cache as of Llama 8B in bfloat16. Attributes with a help text are options; see docs/benchmarks.md."""

    tokens: int = option(8192, "tokens of the prompt")
    layers: int = option(32, "layers of the model")
    heads: int = option(8, "KV heads")
    head_dim: int = option(128, "elements of a head")
    block_size: int = option(16, "tokens of a block")
    chunk_size: int = option(256, "tokens of a chunk")
    threads: tuple[int, ...] = field(default=(1, 2))


QUICK = Settings(tokens=512, layers=2)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    form = CacheForm(
        settings.tokens,
        settings.layers,
        settings.heads,
        settings.head_dim,
        settings.block_size,
        settings.chunk_size,
    )
    cache = PromptCache.of(form)
    arena = Arena(cache.arena_bytes, cache.record_bytes)
    arena.wait_prepared(_PREPARE_S)
    with contextlib.closing(arena), _records(cache, arena) as records:
        rows, layers = _row_pairs(cache, records), _layer_pairs(cache, records)
        try:
            for threads in settings.threads:
                async with cache.open(copy_threads=threads) as engine:
                    with ThreadPoolExecutor(threads) as pool:
                        copies = Copies(pool, threads, cache.nbytes)
                        for row in await frame.compare(_cases(cache, engine, copies, rows, layers)):
                            yield row
        finally:
            rows.clear()
            layers.clear()


def _cases(cache: PromptCache, engine: CacheEngine, copies: Copies, rows: Pairs, layers: Pairs) -> list[Case]:
    parameters = {
        "threads": copies.threads,
        "tokens": cache.form.tokens,
        "layers": cache.form.layers,
        "row_bytes": cache.layout.planes[0].row_bytes,
        "record_bytes": cache.record_bytes,
    }

    async def store() -> float:
        await engine.clear()
        start = time.perf_counter()
        await cache.store(engine)
        return cache.nbytes / (time.perf_counter() - start) / 1e9

    async def retrieve() -> float:
        await cache.ensure_stored(engine)
        start = time.perf_counter()
        await cache.retrieve(engine)
        return cache.nbytes / (time.perf_counter() - start) / 1e9

    def memcpy(*, back: bool) -> dict[str, Probe]:
        return {
            "memcpy of the same rows": copies.probe(rows, back=back),
            "memcpy layer by layer": copies.probe(layers, back=back),
        }

    threads = f"{copies.threads} thread" + "s" * (copies.threads > 1)
    return [
        Case(f"store, {threads}", UNIT, store, memcpy(back=False), parameters),
        Case(f"retrieve, {threads}", UNIT, retrieve, memcpy(back=True), parameters),
    ]


class Copies:
    """memcpy of pairs of pieces, shared out among threads."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int, nbytes: int) -> None:
        self.threads = threads
        self._pool = pool
        self._nbytes = nbytes

    def probe(self, pairs: Pairs, *, back: bool) -> Probe:
        """GB/s of copying each pair's first piece to its second, or back."""
        share = -(-len(pairs) // self.threads)
        shares = [pairs[start : start + share] for start in range(0, len(pairs), share)]

        async def probe() -> float:
            start = time.perf_counter()
            list(self._pool.map(_copy_back if back else _copy_out, shares))
            return self._nbytes / (time.perf_counter() - start) / 1e9

        return probe


def _copy_out(pairs: Pairs) -> None:
    for device, host in pairs:
        np.copyto(host, device)


def _copy_back(pairs: Pairs) -> None:
    for device, host in pairs:
        np.copyto(device, host)


@contextlib.contextmanager
def _records(cache: PromptCache, arena: Arena) -> Iterator[list[Bytes]]:
    """The payloads of as many records as the prompt has."""
    buffers = [arena.lease_nowait(cache.record_bytes) for _ in range(cache.num_chunks)]
    payloads = [buffer.array[cache.record_format.header_bytes :] for buffer in buffers if buffer is not None]
    try:
        yield payloads
    finally:
        payloads.clear()
        for buffer in buffers:
            if buffer is not None:
                buffer.release()


def _row_pairs(cache: PromptCache, records: Sequence[Bytes]) -> Pairs:
    """Each row of the cache and its place in a record, in the records' order: chunk, layer, block."""
    per_chunk = cache.form.chunk_size // cache.form.block_size
    memories = _memories(cache)
    size = cache.layout.planes[0].row_bytes
    pairs = []
    for chunk, record in enumerate(records):
        blocks = cache.blocks[chunk * per_chunk : (chunk + 1) * per_chunk].tolist()
        for layer, memory in enumerate(memories):
            for index, block in enumerate(blocks):
                at = (layer * per_chunk + index) * size
                pairs.append((memory[block * size : (block + 1) * size], record[at : at + size]))
    return pairs


def _layer_pairs(cache: PromptCache, records: Sequence[Bytes]) -> Pairs:
    """As many bytes in pieces as large as can be: of each layer a record's part, in one piece on both sides."""
    memories = _memories(cache)
    pairs = []
    for chunk, record in enumerate(records):
        size = len(record) // len(memories)
        for layer, memory in enumerate(memories):
            pairs.append(
                (memory[chunk * size : (chunk + 1) * size], record[layer * size : (layer + 1) * size])
            )
    return pairs


def _memories(cache: PromptCache) -> list[Bytes]:
    return [tensor.view(torch.uint8).numpy().reshape(-1) for tensor in cache.tensors]
