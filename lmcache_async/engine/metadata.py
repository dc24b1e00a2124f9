"""What the synchronous facade is told of the model, by the names that LMCache's metadata has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lmcache_async.config import EngineConfig
from lmcache_async.device.layout import KVLayout, Layers
from lmcache_async.hashing import Namespace

Memory: TypeAlias = list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LMCacheEngineMetadata:
    """What the KV depends on besides tokens, by the names that LMCache's metadata has.

    Attributes:
        model_name: Name of the model.
        world_size: Ranks of the model.
        worker_id: This rank.
        weights: Fingerprint of the weights (`lmcache_async.hashing.weights_fingerprint`), or a text that
            changes whenever they do. Without one, weights replaced under the same name are not noticed.
        kv_dtype: Element type of the KV cache; None takes it from the tensors.
        block_size: Tokens of a block; needed where the tensors' shape does not tell, as with pairs of
            K and V of shape [blocks, block size, heads, head size].
        kv_order: Where even that leaves two readings: a letter for each dimension of a tensor, as
            `KVLayout.from_token_slots` takes it (`2BNHD`, `BHNC`).
    """

    model_name: str = ""
    world_size: int = 1
    worker_id: int = 0
    weights: str = ""
    kv_dtype: torch.dtype | None = None
    block_size: int | None = None
    kv_order: str | None = None

    def layout_of(self, kv_caches: Layers) -> KVLayout:
        """The layout of the paged cache, whose rows are token slots.

        Raises:
            ValueError: The shapes are unknown, ambiguous, or not what the metadata say.
        """
        return KVLayout.from_token_slots(kv_caches, order=self.kv_order, block_size=self.block_size)

    def namespace_of(self, layout: KVLayout, config: EngineConfig) -> Namespace:
        return Namespace(
            model=self.model_name,
            weights=self.weights,
            dtype=str(self.kv_dtype) if self.kv_dtype is not None else layout.dtype,
            layout=layout.text,
            world_size=self.world_size,
            tp_rank=self.worker_id,
            tp_size=self.world_size,
            chunk_size=config.chunk_size,
            algorithm=config.hash_algorithm,
            hash_key=config.read_hash_key(),
        )


def memory_of(kv_caches: Layers) -> Memory:
    """Where the tensors lie, and how: equal for two caches that are one."""
    layers = kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches
    parts = [part for layer in layers for part in ([layer] if isinstance(layer, torch.Tensor) else layer)]
    return [(part.data_ptr(), tuple(part.shape), part.stride(), part.dtype) for part in parts]
