"""Store and retrieve in host memory, compared with memcpy; and the paged cache of benchmarks.

The first limit copies the same rows between the paged cache, in its order of blocks, and records in memory
like the engine's. The second limit copies the same number of bytes in larger pieces: all rows of a
layer of each record at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lmcache_async.bench.measure import UNIT, Case, Frame, Probe, Row, check_memory
from lmcache_async.bench.raw import move_all
from lmcache_async.config import load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import ConfigError, TierError
from lmcache_async.hashing import Namespace
from lmcache_async.memory.buffer import pages
from lmcache_async.memory.record import RecordFormat
from lmcache_async.memory.region import Region

Bytes: TypeAlias = npt.NDArray[np.uint8]
Pairs: TypeAlias = "list[tuple[Bytes, Bytes]]"

SUMMARY = "store and retrieve in host memory, compared with memcpy"
_PREPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class CacheForm:
    """Sizes of a model's KV and of a prompt."""

    tokens: int
    layers: int = 1
    heads: int = 1
    head_dim: int = 1
    block_size: int = 16
    chunk_size: int = 256

    @property
    def nbytes(self) -> int:
        """Bytes of the cache: K and V of two bytes each."""
        return 4 * self.tokens * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Settings(CacheForm):
    """A cache like that of Llama 8B in bfloat16."""

    tokens: int = 8192
    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    threads: tuple[int, ...] = (1, 2)  # measured one after the other


QUICK = {"tokens": 512, "layers": 2}


class PromptCache:
    """A paged cache in bfloat16, `[block][head][token][K and V]`, filled by one prompt in random order of blocks.

    Attributes:
        nbytes: Bytes of the KV of the prompt.
        slab_bytes: Bytes of a record, rounded up to whole pages.
        arena_bytes: Size of an arena for all records of the prompt.
    """

    def __init__(self, form: CacheForm) -> None:
        if form.tokens % form.chunk_size or form.chunk_size % form.block_size:
            raise ConfigError(
                f"{form.tokens} tokens in chunks of {form.chunk_size} in blocks of {form.block_size}: "
                "each must be a multiple of the next"
            )
        check_memory(form.nbytes)
        self.form = form
        count = form.tokens // form.block_size
        shape = (count, form.heads, form.block_size, 2 * form.head_dim)
        self.tensors = [torch.full(shape, layer + 1.0, dtype=torch.bfloat16) for layer in range(form.layers)]
        self.layout = KVLayout.from_block_views(self.tensors, num_blocks=count, block_size=form.block_size)
        random = np.random.default_rng(0)
        self.tokens = random.integers(1000, 128000, form.tokens, np.int32)
        self.blocks = random.permutation(count)
        dtype, layout = self.layout.dtype, self.layout.text
        self.namespace = Namespace(
            model="benchmark", weights="none", dtype=dtype, layout=layout, chunk_size=form.chunk_size
        )
        self.record_format = RecordFormat(self.namespace.text, layout, dtype, form.chunk_size)
        self.num_chunks = form.tokens // form.chunk_size
        self.nbytes = self.layout.payload_bytes(count)
        self.record_bytes = self.record_format.record_bytes(self.nbytes // self.num_chunks)
        self.slab_bytes = pages(self.record_bytes)
        self.arena_bytes = self.slab_bytes * self.num_chunks

    def open(self, **settings: Any) -> contextlib.AbstractAsyncContextManager[CacheEngine]:
        """Open an engine for this prompt, by default with the memory tier alone."""
        own = {"chunk_size": self.form.chunk_size, "arena.max_bytes": self.arena_bytes, "tiers": ["cpu"]}
        config = load_config(env={}, extra=own | settings)
        return CacheEngine.open(config, layout=self.layout, namespace=self.namespace)

    async def store(self, engine: CacheEngine, *, flush_s: float | None = None) -> None:
        """Store the whole prompt; with `flush_s`, wait until all tiers have it."""
        report = await engine.store(self.tokens, self.blocks)
        if report.stored != self.num_chunks:
            dropped = ", ".join(f"{count} {cause}" for cause, count in report.dropped.items())
            raise TierError(f"{report.stored} of {self.num_chunks} chunks were stored; dropped: {dropped}")
        if flush_s is not None and not await engine.flush(timeout_s=flush_s):
            raise TierError(f"the store did not end in {flush_s:.0f} s")

    async def ensure_stored(self, engine: CacheEngine, *, flush_s: float | None = None) -> None:
        if await engine.lookup(self.tokens) != len(self.tokens):
            await self.store(engine, flush_s=flush_s)

    async def retrieve(self, engine: CacheEngine) -> None:
        mask = await engine.retrieve(self.tokens, self.blocks)
        if not bool(mask.all()):
            raise TierError(f"{int(mask.sum())} of {len(mask)} tokens came back: {engine.statistics()}")

    def probes(
        self, engine: CacheEngine, figure: Callable[[float], float], *, flush_s: float | None = None
    ) -> tuple[Probe, Probe]:
        """Return probes of a store of the whole prompt into empty tiers and of a retrieve. `figure` converts seconds."""

        async def store() -> float:
            await engine.clear()
            start = time.perf_counter()
            await self.store(engine, flush_s=flush_s)
            return figure(time.perf_counter() - start)

        async def retrieve() -> float:
            await self.ensure_stored(engine, flush_s=flush_s)
            start = time.perf_counter()
            await self.retrieve(engine)
            return figure(time.perf_counter() - start)

        return store, retrieve


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    check_memory(3 * settings.nbytes)  # the cache, the engine's records, and those of the limits
    cache = PromptCache(settings)
    region = Region(
        cache.arena_bytes,
        grain_bytes=cache.slab_bytes,
        pin=False,
        pin_device=None,
        huge_pages=True,
        prefault=True,
    )
    region.wait_prepared(_PREPARE_S)
    with contextlib.closing(region):
        pieces = _pieces(cache, region)
        for threads in settings.threads:
            async with cache.open(copy_threads=threads) as engine:
                for row in await frame.compare(_cases(cache, engine, pieces, threads)):
                    yield row


def _cases(cache: PromptCache, engine: CacheEngine, pieces: Mapping[str, Pairs], threads: int) -> list[Case]:
    parameters = {
        "threads": threads,
        "tokens": cache.form.tokens,
        "layers": cache.form.layers,
        "row_bytes": cache.layout.planes[0].row_bytes,
        "record_bytes": cache.record_bytes,
    }

    def memcpy(*, back: bool) -> dict[str, Probe]:
        return {name: _copy_probe(pairs, threads, cache.nbytes, back=back) for name, pairs in pieces.items()}

    store, retrieve = cache.probes(engine, lambda seconds: cache.nbytes / seconds / 1e9)
    suffix = f"{threads} thread" + "s" * (threads > 1)
    return [
        Case(f"store, {suffix}", UNIT, store, memcpy(back=False), parameters),
        Case(f"retrieve, {suffix}", UNIT, retrieve, memcpy(back=True), parameters),
    ]


def _copy_probe(pairs: Pairs, threads: int, nbytes: int, *, back: bool) -> Probe:
    """Return a probe of GB/s of memcpy from the first array of each pair to the second, or with `back` the reverse."""
    share = -(-len(pairs) // threads)
    shares = [pairs[start : start + share] for start in range(0, len(pairs), share)]

    def copy(_: int, share: Pairs) -> None:
        for device, host in share:
            np.copyto(*((device, host) if back else (host, device)))

    async def probe() -> float:
        return move_all(copy, range(threads), shares, nbytes)

    return probe


def _pieces(cache: PromptCache, region: Region) -> dict[str, Pairs]:
    """Pair pieces of the cache with their places in records, by the name of the limit that copies them.

    The rows are in the order chunk, layer, block. The larger pieces are the layers of a record, with the blocks
    in their order in memory.
    """
    count, size = cache.num_chunks, cache.form.chunk_size // cache.form.block_size
    slabs = np.frombuffer(region.view, np.uint8).reshape(count, cache.slab_bytes)
    payloads = slabs[:, cache.record_format.header_bytes : cache.record_bytes]
    records = [payload.reshape(cache.form.layers, size, -1) for payload in payloads]
    memories = [tensor.view(torch.uint8).numpy().reshape(count, size, -1) for tensor in cache.tensors]
    places = [divmod(block, size) for block in cache.blocks.tolist()]
    rows = [
        (memory[places[chunk * size + index]], record[layer, index])
        for chunk, record in enumerate(records)
        for layer, memory in enumerate(memories)
        for index in range(size)
    ]
    layers = [
        (memory[chunk], record[layer])
        for chunk, record in enumerate(records)
        for layer, memory in enumerate(memories)
    ]
    return {"memcpy of the same rows": rows, "memcpy layer by layer": layers}
