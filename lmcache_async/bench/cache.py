"""A paged KV cache as vLLM has it, with a prompt in it, and engines over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcache_async.config import load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.memory.record import RecordFormat

if TYPE_CHECKING:
    import contextlib

    import numpy.typing as npt

PAGE = 4096


@dataclass(frozen=True, slots=True)
class CacheForm:
    """A model's KV and the tokens of a prompt."""

    tokens: int
    layers: int = 1
    heads: int = 1
    head_dim: int = 1
    block_size: int = 16
    chunk_size: int = 256


@dataclass(frozen=True, slots=True, eq=False)
class PromptCache:
    """A paged cache in bfloat16 that a prompt fills, in blocks without an order.

    Attributes:
        tensors: One a layer, `[block][head][token][K and V]`.
        blocks: The prompt's, one a row.
    """

    form: CacheForm
    tensors: list[torch.Tensor]
    layout: KVLayout
    tokens: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int64]

    @classmethod
    def of(cls, form: CacheForm) -> PromptCache:
        """Raises ConfigError where the prompt is no whole number of chunks, or a chunk none of blocks."""
        if form.tokens % form.chunk_size or form.chunk_size % form.block_size:
            raise ConfigError(
                f"{form.tokens} tokens in chunks of {form.chunk_size} in blocks of {form.block_size}: "
                "each must be a multiple of the next"
            )
        count = form.tokens // form.block_size
        shape = (count, form.heads, form.block_size, 2 * form.head_dim)
        tensors = [torch.full(shape, layer + 1.0, dtype=torch.bfloat16) for layer in range(form.layers)]
        layout = KVLayout.from_block_views(tensors, num_blocks=count, block_size=form.block_size)
        random = np.random.default_rng(0)
        tokens = random.integers(1000, 128000, form.tokens, np.int32)
        return cls(form, tensors, layout, tokens, random.permutation(count))

    @property
    def num_chunks(self) -> int:
        return self.form.tokens // self.form.chunk_size

    @property
    def nbytes(self) -> int:
        return self.layout.payload_bytes(len(self.blocks))

    @property
    def namespace(self) -> Namespace:
        return Namespace(
            model="benchmark",
            weights="none",
            dtype=self.layout.dtype,
            layout=self.layout.text,
            chunk_size=self.form.chunk_size,
        )

    @property
    def record_format(self) -> RecordFormat:
        return RecordFormat(self.namespace.text, self.layout.text, self.layout.dtype, self.form.chunk_size)

    @property
    def record_bytes(self) -> int:
        rows = self.form.chunk_size // self.form.block_size
        return self.record_format.record_bytes(self.layout.payload_bytes(rows))

    @property
    def slab_bytes(self) -> int:
        """Bytes of a record in whole pages."""
        return -(-self.record_bytes // PAGE) * PAGE

    @property
    def arena_bytes(self) -> int:
        """Of an arena that the prompt's records fill."""
        return self.slab_bytes * self.num_chunks

    def open(self, **settings: Any) -> contextlib.AbstractAsyncContextManager[CacheEngine]:
        """An engine with host memory alone, for this prompt; all but `settings` is as by default."""
        own = {"chunk_size": self.form.chunk_size, "arena.max_bytes": self.arena_bytes, "tiers": ["cpu"]}
        config = load_config(env={}, extra=own | settings)
        return CacheEngine.open(config, layout=self.layout, namespace=self.namespace)

    async def store(self, engine: CacheEngine) -> None:
        """Store the whole prompt.

        Raises:
            RuntimeError: Some of it was not stored, so that there is nothing to measure.
        """
        report = await engine.store(self.tokens, self.blocks)
        if report.stored != self.num_chunks:
            raise RuntimeError(f"{report.stored} of {self.num_chunks} chunks were stored: {report}")

    async def ensure_stored(self, engine: CacheEngine) -> None:
        if await engine.lookup(self.tokens) != len(self.tokens):
            await self.store(engine)

    async def retrieve(self, engine: CacheEngine) -> None:
        """Load the whole prompt.

        Raises:
            RuntimeError: Some of it was not there.
        """
        mask = await engine.retrieve(self.tokens, self.blocks)
        if not bool(mask.all()):
            raise RuntimeError(f"{int(mask.sum())} of {len(mask)} tokens came back: {engine.statistics()}")
