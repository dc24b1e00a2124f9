"""Small paged KV caches of random bytes, in every supported physical layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from lmcache_async.device.layout import KVLayout

VLLM_ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Physical dimension orders of vLLM's [B, H, N, C] views; L is the layer."""

SLOT_ORDERS = ("2BNHD", "B2NHD", "BNHD", "BND", "BHNC")
"""Dimension orders of plain tensors, as LMCache's users have them; `BHNC` is a view in the order `LBHNC`."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class CacheForm:
    """Physical layout of a paged cache, without its number of blocks and its device.

    Attributes:
        order: Physical order of the dimensions: one of VLLM_ORDERS, or of SLOT_ORDERS for plain tensors.
        tokens: Tokens of a block.
        content: Elements of one token and head.
        padding: Unused elements after each block; views only.
        separate: Each layer has its own storage.
        shared_layers: Number of additional layers that alias the first one.
        kernel_blocks: Kernel blocks per block; dimension 0 counts kernel blocks. Views by block only.
        all_heads: KV heads in memory, if the tensors are views of `heads` of them and the layout is made with
            `by_head`; 0 if the tensors have all heads. Views by block only.
        first_head: First head of the tensors among `all_heads`.
    """

    order: str = "LBNHC"
    granularity: str = "block"
    layers: int = 2
    heads: int = 2
    tokens: int = 4
    content: int = 8
    dtype: torch.dtype = torch.bfloat16
    padding: int = 0
    separate: bool = False
    shared_layers: int = 0
    kernel_blocks: int = 1
    all_heads: int = 0
    first_head: int = 0

    def build(self, num_blocks: int, *, seed: int = 0, device: str = "cpu") -> PagedCache:
        """Allocate a cache of this layout and fill its storages with random bytes."""
        count = 1 if self.separate else self.layers
        shape, strides, elements = self._geometry(num_blocks, count)
        storages, tensors = [], []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.layers // count):
            nbytes = elements * self.dtype.itemsize
            storage = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)
            storages.append(storage)
            typed = storage.view(self.dtype)
            tensors += [
                typed.as_strided(shape, strides[1:], layer * strides[0] + self._lead)
                for layer in range(count)
            ]
        if self.all_heads:
            tensors = [tensor.narrow(1, self.first_head, self.heads) for tensor in tensors]
        tensors += tensors[:1] * self.shared_layers
        return PagedCache(self, num_blocks, tuple(tensors), tuple(storages))

    @property
    def _lead(self) -> int:
        return 16 if self.separate else 0

    @property
    def logical(self) -> str:
        """Letters of a tensor's dimensions, in order."""
        return self.order if self.order in SLOT_ORDERS else "BHNC"

    def _geometry(self, num_blocks: int, layers: int) -> tuple[tuple[int, ...], list[int], int]:
        """Return a tensor's shape, the strides of layers and of its dimensions, and a storage's elements."""
        physical = "L" + self.order if self.order in SLOT_ORDERS else self.order
        tokens = self.tokens // self.kernel_blocks
        heads = self.all_heads or self.heads
        sizes = {"L": layers, "B": num_blocks * self.kernel_blocks, "H": heads, "N": tokens, "2": 2}
        sizes |= {"C": self.content, "D": self.content}
        strides: dict[str, int] = {}
        span = 1
        for letter in reversed(physical):
            if letter == "B":
                span += self.padding
            strides[letter] = span
            span *= sizes[letter]
        shape = tuple(sizes[letter] for letter in self.logical)
        return shape, [strides["L"], *(strides[letter] for letter in self.logical)], span + 2 * self._lead


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A paged cache."""

    form: CacheForm
    num_blocks: int
    tensors: tuple[torch.Tensor, ...]  # one for each layer
    storages: tuple[torch.Tensor, ...]  # all memory: one-dimensional uint8 tensors

    @property
    def layout(self) -> KVLayout:
        named = {f"layer.{index}": tensor for index, tensor in enumerate(self.tensors)}
        if self.form.granularity == "token":
            return KVLayout.from_token_slots(named, order=self.form.logical)
        return KVLayout.from_block_views(
            named,
            num_blocks=self.num_blocks,
            block_size=self.form.tokens,
            by_head=self.form.all_heads > 0,
        )

    def snapshot(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages]


@st.composite
def cache_forms(
    draw: st.DrawFn,
    *,
    granularities: Sequence[str] = ("block", "token"),
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> CacheForm:
    """Layouts of paged caches: all orders, MLA, opaque bytes, padding, aliases, kernel blocks, some of the heads."""
    granularity = draw(st.sampled_from(granularities))
    by_block = granularity == "block"
    order = draw(st.sampled_from(VLLM_ORDERS if by_block else (*VLLM_ORDERS, *SLOT_ORDERS)))
    padded = order in VLLM_ORDERS
    block_outside = order.index("B") < order.index("N")
    kernel_blocks = draw(st.sampled_from((1, 1, 2))) if by_block and order.startswith("LB") else 1
    heads = draw(st.integers(1, 3))
    all_heads = draw(st.sampled_from((0, heads, 2 * heads))) if by_block else 0
    return CacheForm(
        order=order,
        granularity=granularity,
        layers=draw(st.integers(1, 3)),
        heads=heads,
        tokens=draw(st.integers(1, 4)) * kernel_blocks,
        content=draw(st.sampled_from((4, 8, 12, 7))),
        dtype=draw(st.sampled_from(dtypes)),
        padding=draw(st.sampled_from((0, 0, 4, 5))) if padded and block_outside else 0,
        separate=draw(st.booleans()),
        shared_layers=draw(st.integers(0, 1)),
        kernel_blocks=kernel_blocks,
        all_heads=all_heads,
        first_head=draw(st.integers(0, all_heads - heads)) if all_heads else 0,
    )
