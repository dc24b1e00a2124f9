"""A small paged KV cache in host memory, and engines for it, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import Namespace
from lmcache_async.memory.buffer import pages
from lmcache_async.memory.record import RecordFormat
from lmcache_async.registry import Registry
from lmcache_async.testing.fakes import installed


@dataclass(slots=True)
class Rig:
    """A cache of `layers` pairs of K and V, float32, each of shape [blocks, block_size, heads, head_dim].

    Chunk keys are made with sha256 if there is a `hash_key`, else with xxh3_128.
    """

    layers: int = 2
    blocks: int = 32
    block_size: int = 4
    heads: int = 1
    head_dim: int = 4
    chunk_size: int = 8
    slabs: int = 16  # full records in the arena of an engine
    model: str = "test"
    hash_key: bytes = b""
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    layout: KVLayout = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.blocks, self.block_size, self.heads, self.head_dim)
        self.tensors = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(self.layers)]
        self.layout = KVLayout.from_token_slots(self.tensors, order="BNHD")

    @property
    def num_slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def namespace(self) -> Namespace:
        return Namespace(
            model=self.model,
            weights="none",
            dtype=self.layout.dtype,
            layout=self.layout.text,
            chunk_size=self.chunk_size,
            algorithm="sha256" if self.hash_key else "xxh3_128",
            hash_key=self.hash_key,
        )

    @property
    def slab_bytes(self) -> int:
        """Bytes of a full chunk's record, in whole pages."""
        record = RecordFormat(
            namespace=self.namespace.text,
            layout=self.layout.text,
            dtype=self.layout.dtype,
            chunk_size=self.chunk_size,
        )
        return pages(record.record_bytes(self.layout.payload_bytes(self.chunk_size)))

    def config(self, **settings: Any) -> EngineConfig:
        """Return a config for this cache, with additional settings as in a config file."""
        base: dict[str, Any] = {
            "chunk_size": self.chunk_size,
            "arena.max_bytes": self.slabs * self.slab_bytes,
            "arena.prefault": False,
            "arena.huge_pages": False,
            "store.batch_bytes": 3 * self.slab_bytes,
            "retrieve.batch_bytes": 3 * self.slab_bytes,
            "store.allocate_timeout_s": 0.05,
            "shutdown_timeout_s": 1.0,
        }
        return load_config(env={}, extra=base | settings)

    def open(
        self, *, registry: Registry | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[CacheEngine]:
        """Open an engine for this cache, with the installed plug-ins by default."""
        return CacheEngine.open(
            self.config(**settings),
            layout=self.layout,
            namespace=self.namespace,
            registry=registry or installed(),
        )

    def write(self, slots: Sequence[int], values: torch.Tensor) -> None:
        """Write `values`, in the shape that `read` returns, into the slots."""
        index = torch.as_tensor(list(slots), dtype=torch.long)
        for layer, (keys, vals) in enumerate(self.tensors):
            keys.view(self.num_slots, -1)[index] = values[layer, 0]
            vals.view(self.num_slots, -1)[index] = values[layer, 1]

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """Return the content of the slots: float32 of shape [layers, 2, len(slots), heads * head_dim]."""
        index = torch.as_tensor(list(slots), dtype=torch.long)
        return torch.stack(
            [torch.stack([part.view(self.num_slots, -1)[index] for part in pair]) for pair in self.tensors]
        )

    def content(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the KV that a model would compute for a prompt: it depends on each token and all before it.

        The shape is that of `read`.
        """
        history = np.cumsum(np.asarray(tokens, np.float64) * (1 + np.arange(len(tokens))))
        base = torch.as_tensor(np.sin(history + 1), dtype=torch.float32)
        scale = torch.arange(1, 2 * self.layers * self.heads * self.head_dim + 1, dtype=torch.float32)
        return (
            (base[:, None] * scale[None, :])
            .reshape(len(tokens), self.layers, 2, -1)
            .permute(1, 2, 0, 3)
            .contiguous()
        )

    def wipe(self) -> None:
        for pair in self.tensors:
            for part in pair:
                part.fill_(-7.0)
