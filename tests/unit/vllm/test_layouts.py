"""Pages of vLLM's KV caches with more than keys and values: with inline scales, packed or padded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache_async.device.layout import KVLayout

LAYERS, BLOCKS, BLOCK, HEADS, SIZE = 2, 3, 16, 2, 64
FULL: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": HEADS,
    "head_size": SIZE,
    "dtype": torch.bfloat16,
}
MLA: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
# Layouts of vLLM's attention backends for a number format; most of them need a GPU.
SPECS = {
    "8 bits": FullAttentionSpec(
        **FULL | {"dtype": torch.float8_e4m3fn}, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
    ),
    "8 bits, a scale for each token and head": FullAttentionSpec(
        **FULL | {"dtype": torch.int8},
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        state_content_bytes=2 * (SIZE + 4),
    ),
    "4 bits, a scale for each token and head": FullAttentionSpec(
        **FULL | {"dtype": torch.uint8},
        kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD,
        state_content_bytes=2 * (SIZE // 2 + 4),
    ),
    "4 bits, keys and values in slots of their own": FullAttentionSpec(
        **FULL | {"dtype": torch.uint8},
        kv_quant_mode=KVQuantMode.NVFP4,
        num_head_slots=2 * HEADS,
        state_content_bytes=SIZE // 2 + SIZE // 16,
    ),
    "all heads in one slot": FullAttentionSpec(
        **FULL, num_head_slots=2, state_content_bytes=2 * HEADS * SIZE
    ),
    "values smaller than keys": FullAttentionSpec(**FULL, head_size_v=SIZE // 2),
    "padded": FullAttentionSpec(**FULL, page_size_padded=2 * BLOCK * HEADS * 2 * SIZE + 512),
    "latents": MLAAttentionSpec(**MLA),
    "latents with scales": MLAAttentionSpec(
        **MLA | {"dtype": torch.uint8}, cache_dtype_str="fp8_ds_mla", state_content_bytes=656
    ),
}


def views_of(spec: Any, form: KVCacheLayout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The memory of vLLM's cache, and the views of its layers that are passed to a connector."""
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, form)
    raw = torch.zeros(LAYERS * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    names = [f"layer.{index}" for index in range(LAYERS)]
    tensor = KVCacheTensor(raw.numel(), names, layer_stride=strides[0], block_stride=strides[1])
    return raw, dict(zip(names, create_kv_cache_views(raw, spec, BLOCKS, form, tensor), strict=True))


CASES = {
    f"{name}, {form.name}": (spec, form)
    for name, spec in SPECS.items()
    for form in KVCacheLayout
    if spec.page_size_padded is None or form.is_block_compact  # vLLM pads no others
}


@pytest.mark.parametrize(("spec", "form"), CASES.values(), ids=CASES)
def test_a_row_has_every_byte_of_its_block_once(spec: Any, form: KVCacheLayout) -> None:
    raw, views = views_of(spec, form)

    layout = KVLayout.from_block_views(views, num_blocks=BLOCKS, block_size=BLOCK)

    assert layout.bytes_per_row == LAYERS * spec.unpadded_page_size_bytes
    copied = torch.zeros_like(raw)
    for plane, row in itertools.product(layout.planes, range(BLOCKS)):
        copied[plane.start(row) : plane.start(row) + plane.row_bytes] += row + 1
    for view, row in itertools.product(views.values(), range(BLOCKS)):
        view[row].view(torch.int8).fill_(row + 1)
    assert torch.equal(copied, raw)


def test_the_layout_text_distinguishes_number_formats() -> None:
    texts = [
        KVLayout.from_block_views(
            views_of(spec, KVCacheLayout.LBNHC)[1], num_blocks=BLOCKS, block_size=BLOCK
        ).text
        for name, spec in SPECS.items()
        if name != "padded"
    ]

    assert len(set(texts)) == len(texts)
