"""One worker of the simulated vLLM: a KV cache whose right contents are known, and our connector's half."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache_async.testing.vllm_setup import CONTENT, HEADS, LAYERS

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Work:
    """What one request computes in one step: positions start..stop in these blocks."""

    start: int
    stop: int
    blocks: Sequence[int]


class Rank:
    """One worker: its KV cache and its half of the connector."""

    def __init__(self, config: Any, cache_config: Any, rank: int) -> None:
        self.rank = rank
        block_size = cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.block_size = block_size
        shape = (cache_config.num_blocks, HEADS, block_size, CONTENT)
        self.caches = {f"layer.{layer}": torch.full(shape, -1.0) for layer in range(LAYERS)}
        self.connector: Any = None
        if config.kv_transfer_config is not None:
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(config.parallel_config)
            mine.parallel_config.rank = rank
            self.connector = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, cache_config)
            self.connector.register_kv_caches(self.caches)

    def write(self, layer: int, work: Work, values: Sequence[int]) -> None:
        """The values of the positions that `work` computes."""
        rows, slots, stored = self._places(work.blocks, work.start, values, layer)
        self.caches[f"layer.{layer}"][rows, :, slots] = stored

    def wrong_positions(self, layer: int, work: Work, values: Sequence[int]) -> list[int]:
        """Where, before what `work` computes, this layer's cache holds something else."""
        rows, slots, stored = self._places(work.blocks, 0, values, layer)
        differs = (self.caches[f"layer.{layer}"][rows, :, slots] != stored).flatten(1).any(1)
        positions: list[int] = differs.nonzero().flatten().tolist()
        return positions

    def _places(
        self, blocks: Sequence[int], start: int, values: Sequence[int], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + len(values))
        rows = torch.tensor(blocks)[positions // self.block_size]
        stored = torch.tensor(values, dtype=torch.float32) * 4 + layer * 2 + self.rank % 2
        return rows, positions % self.block_size, stored.view(-1, 1, 1)
