"""Paged caches as large models have them on a GPU, and which of them fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcache_async.device.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_SIZE = 16
CHUNK_TOKENS = 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_SIZE

STAGING_BYTES = 64 << 20
"""As by default, and for each direction."""

SPARE_BYTES = 1 << 30
"""Of device memory: for tables, CUDA's own needs and what the allocator rounds up."""

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model makes its KV.

    Attributes:
        latent: One compressed vector a token (MLA) in place of K and V.
    """

    layers: int
    heads: int
    head_dim: int
    latent: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        return (
            ("fused", "cross-layer blocks")
            if self.latent
            else ("K and V apart", "fused", "cross-layer blocks")
        )


MODELS = {
    "llama-8b": Model(32, 8, 128),
    "llama-70b": Model(80, 8, 128),
    "deepseek-mla": Model(61, 1, 576, latent=True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One cache to be measured.

    Attributes:
        form: `K and V apart`: each layer's K before its V, as FlashAttention has them; `fused`: K and V of a token side by
            side, or one latent; `cross-layer blocks`: a block holds all layers.
    """

    name: str
    model: Model
    dtype: torch.dtype
    form: str

    @property
    def chunk_bytes(self) -> int:
        parts = 1 if self.model.latent else 2
        elements = self.model.layers * self.model.heads * parts * self.model.head_dim
        return elements * self.dtype.itemsize * CHUNK_TOKENS

    def build(self, num_blocks: int, device: torch.device) -> KVLayout:
        """A cache of so many blocks, every byte random."""
        layout = KVLayout.from_block_views(
            self._views(num_blocks, device), num_blocks=num_blocks, block_size=BLOCK_SIZE
        )
        for storage in layout.storages:
            storage.random_()
        return layout

    def _views(self, blocks: int, device: torch.device) -> list[torch.Tensor | Sequence[torch.Tensor]]:
        model = self.model

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device)

        content = (
            (BLOCK_SIZE, model.head_dim) if model.latent else (model.heads, BLOCK_SIZE, 2 * model.head_dim)
        )
        if self.form == "cross-layer blocks":
            return list(empty(blocks, model.layers, *content).unbind(1))
        if self.form == "fused":
            return [empty(blocks, *content) for _ in range(model.layers)]
        layers = (empty(2, blocks, BLOCK_SIZE, model.heads, model.head_dim) for _ in range(model.layers))
        return [[part.transpose(1, 2) for part in layer.unbind(0)] for layer in layers]


def shapes(models: Sequence[str], *, layers: int = 0) -> list[Shape]:
    """Every form and dtype of these models; with `layers`, of so many layers in place of their own."""
    made = []
    for name in models:
        model = MODELS[name]
        cut = Model(layers or model.layers, model.heads, model.head_dim, latent=model.latent)
        for dtype, element in DTYPES.items():
            made += [Shape(f"{name}, {dtype}, {form}", cut, element, form) for form in model.forms]
    return made


def refusal(nbytes: int, *, device_bytes: int, host_bytes: int) -> str:
    """Why a batch of `nbytes` cannot be measured; "" where it can.

    The device holds it twice, in the paged cache and in one piece, and the staging memory of both directions.
    """
    needed = 2 * nbytes + 2 * STAGING_BYTES + SPARE_BYTES
    if needed > device_bytes:
        return f"it needs {_gib(needed)} of device memory, and {_gib(device_bytes)} are free"
    if nbytes > host_bytes:
        return f"it needs {_gib(nbytes)} of pinned host memory, and {_gib(host_bytes)} may be pinned"
    return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
