"""LMCache's engine, in its own process.

LMCache has no connector for a cache in host memory. It gets one here that copies block by block with
`np.copyto`, which is the best case on one thread. Keys, allocation, the index and everything else are
LMCache's, with default settings. Without copies, a connector of LMCache is used.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

from lmcache_async.bench.memory import CacheForm, PromptCache
from tools.benchmarks import peers
from tools.benchmarks.peers import Ready, Workload

_NUMBERS = itertools.count()
_SPARE_GIB = 0.25


def tasks(work: Workload) -> dict[str, Ready]:
    torch.set_num_threads(1)
    return {
        peers.HASH_LIST: lambda: hashing(work, work.prompt.tolist()),
        peers.HASH_ARRAY: lambda: hashing(work, torch.from_numpy(work.prompt)),
        peers.STORE: lambda: engine(work.form, Engine.store),
        peers.RETRIEVE: lambda: engine(work.form, Engine.retrieve),
        peers.STORE_NOTHING: lambda: engine(work.small, Engine.store, copies=False),
        peers.RETRIEVE_NOTHING: lambda: engine(work.small, Engine.retrieve, copies=False),
        peers.LOOKUP: lambda: engine(work.small, Engine.lookup, copies=False),
        peers.LOOKUP_PINNED: lambda: engine(work.small, Engine.lookup_pinned, copies=False),
    }


@contextlib.contextmanager
def hashing(work: Workload, tokens: Any) -> Iterator[Callable[[], float]]:
    config = LMCacheEngineConfig.from_defaults(chunk_size=work.form.chunk_size)
    database = ChunkedTokenDatabase(config, _metadata(work.form))

    def run() -> float:
        start = time.perf_counter()
        keys = sum(1 for _ in database.process_tokens(tokens))
        seconds = time.perf_counter() - start
        return _checked(seconds, keys, work.hash_tokens // work.form.chunk_size)

    yield run


@contextlib.contextmanager
def engine(
    form: CacheForm, verb: Callable[[Engine], float], *, copies: bool = True
) -> Iterator[Callable[[], float]]:
    opened = Engine(form, copies=copies)
    try:
        yield functools.partial(verb, opened)
    finally:
        opened.close()


class Engine:
    """One engine over a cache in host memory, with a prompt that fills it."""

    def __init__(self, form: CacheForm, *, copies: bool = True) -> None:
        self._cache = PromptCache(form)
        metadata = _metadata(form)
        connector = RowConnector(self._cache) if copies else MockGPUConnector(metadata.kv_shape)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=form.chunk_size,
            local_cpu=True,
            max_local_cpu_size=1.25 * self._cache.nbytes / 2**30 + _SPARE_GIB,
        )
        self._name = f"benchmark-{next(_NUMBERS)}"
        self._engine = LMCacheEngineBuilder.get_or_create(
            self._name, config, metadata, connector, lambda tensor, _: tensor, lambda thing, _: thing
        )
        self._engine.post_init()
        self._tokens = torch.from_numpy(self._cache.tokens.astype(np.int64))
        self._mask = torch.ones(form.tokens, dtype=torch.bool)
        self._options = {
            "kvcaches": self._cache.tensors,
            "slot_mapping": _slots(self._cache),
            "req_id": "benchmark",
        }
        self._lookups = itertools.count()
        if copies:
            self._check()

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self._name)

    def store(self) -> float:
        self._engine.clear()
        start = time.perf_counter()
        self._engine.store(tokens=self._tokens, **self._options)
        seconds = time.perf_counter() - start
        return _checked(seconds, self._engine.lookup(tokens=self._tokens), len(self._tokens))

    def retrieve(self) -> float:
        self._ensure_stored()
        start = time.perf_counter()
        mask = self._engine.retrieve(self._tokens, self._mask, **self._options)
        seconds = time.perf_counter() - start
        return _checked(seconds, int(mask.sum()), len(self._tokens))

    def lookup(self) -> float:
        self._ensure_stored()
        start = time.perf_counter()
        found = self._engine.lookup(tokens=self._tokens)
        return _checked(time.perf_counter() - start, found, len(self._tokens))

    def lookup_pinned(self) -> float:
        self._ensure_stored()
        name = f"lookup-{next(self._lookups)}"
        start = time.perf_counter()
        found = self._engine.lookup(tokens=self._tokens, lookup_id=name, pin=True)
        self._engine.lookup_unpin(name)
        return _checked(time.perf_counter() - start, found, len(self._tokens))

    def _ensure_stored(self) -> None:
        if self._engine.lookup(tokens=self._tokens) != len(self._tokens):
            self.store()

    def _check(self) -> None:
        """Check that the stored content is retrieved.

        Raises:
            RuntimeError: The content differs, so measurements would be meaningless.
        """
        for tensor in self._cache.tensors:
            tensor.view(torch.int16).random_()
        before = [tensor.clone() for tensor in self._cache.tensors]
        self.store()
        for tensor in self._cache.tensors:
            tensor.zero_()
        self.retrieve()
        if not all(
            torch.equal(tensor.view(torch.int16), kept.view(torch.int16))
            for tensor, kept in zip(self._cache.tensors, before, strict=True)
        ):
            raise RuntimeError("the loaded cache differs from the stored one")


class RowConnector(GPUConnectorInterface):  # type: ignore[misc, unused-ignore]
    """Copies blocks between a `PromptCache` and LMCache's memory objects, `[layer][block]` as in records."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache
        rows = len(cache.blocks)
        self._layers = [tensor.view(torch.uint8).numpy().reshape(rows, -1) for tensor in cache.tensors]

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        self._move(memory_obj, start, end, out=True)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        self._move(memory_obj, start, end, out=False)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self._move(memory, start, end, out=True)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **_: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self._move(memory, start, end, out=False)

    def get_shape(self, num_tokens: int) -> torch.Size:
        form = self._cache.form
        return torch.Size([2, form.layers, num_tokens, form.heads * form.head_dim])

    def _move(self, memory: Any, start: int, end: int, *, out: bool) -> None:
        size = self._cache.form.block_size
        blocks: Sequence[int] = self._cache.blocks[start // size : end // size].tolist()
        flat = memory.tensor.view(torch.uint8).numpy().reshape(len(self._layers), len(blocks), -1)
        for layer, record in zip(self._layers, flat, strict=True):
            for row, block in zip(record, blocks, strict=True):
                if out:
                    np.copyto(row, layer[block])
                else:
                    np.copyto(layer[block], row)


def _metadata(form: CacheForm) -> Any:
    shape = (form.layers, 2, form.chunk_size, form.heads, form.head_dim)
    return LMCacheMetadata("benchmark", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=form.chunk_size)


def _slots(cache: PromptCache) -> torch.Tensor:
    size = cache.form.block_size
    slots = cache.blocks[:, None] * size + np.arange(size)
    return torch.from_numpy(slots.reshape(-1).astype(np.int64))


def _checked(seconds: float, found: int, expected: int) -> float:
    if found != expected:
        raise RuntimeError(f"{found} of {expected} were there")
    return seconds
