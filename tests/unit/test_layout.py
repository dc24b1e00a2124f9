"""The paged cache as planes of rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.device.layout import KVLayout
from lmcache_async.device.planes import Plane, RowStrides, check_overlap
from lmcache_async.testing.caches import DTYPES, VLLM_ORDERS, CacheForm, cache_forms

BYTES_PER_LAYER = 16 * 2 * 64 * 2 * 2  # tokens, heads, head size, K and V, bf16


def vllm_cache(order, num_blocks=10):
    return CacheForm(order=order, layers=3, heads=2, tokens=16, content=128).build(num_blocks)


@pytest.mark.parametrize(
    ("order", "planes", "row_bytes"),
    [
        ("LBNHC", 3, 8192),
        ("LBHNC", 3, 8192),
        ("LHBNC", 6, 4096),
        ("BLHNC", 1, 24576),
        ("BLNHC", 1, 24576),
        ("BHLNC", 1, 24576),
    ],
)
def test_each_order_of_vllm_has_as_few_planes_as_its_memory_allows(order, planes, row_bytes):
    layout = vllm_cache(order).layout

    assert [plane.row_bytes for plane in layout.planes] == [row_bytes] * planes
    assert layout.bytes_per_row == 3 * BYTES_PER_LAYER
    assert layout.payload_bytes(5) == 15 * BYTES_PER_LAYER
    assert (layout.num_rows, layout.tokens_per_row, layout.num_planes) == (10, 16, planes)


@given(cache_forms(), st.integers(1, 4))
def test_planes_cover_exactly_the_bytes_of_all_rows_once(form, num_blocks):
    cache = form.build(num_blocks)
    layout = cache.layout

    covered = [torch.zeros_like(storage, dtype=torch.int32) for storage in cache.storages]
    for plane, row in itertools.product(layout.planes, range(layout.num_rows)):
        covered[plane.storage][plane.start(row) : plane.start(row) + plane.row_bytes] += 1
    for storage in cache.storages:
        storage.zero_()
    for tensor in cache.tensors:
        tensor.view(torch.uint8 if form.dtype.itemsize == 1 else form.dtype).fill_(1)
    itemsize = form.dtype.itemsize
    for storage, count in zip(cache.storages, covered, strict=True):
        used = (storage.view(-1, itemsize) != 0).any(1).repeat_interleave(itemsize)
        assert torch.equal(count, used.int())


@given(cache_forms(), st.integers(1, 5), st.integers(1, 5))
def test_the_text_of_a_layout_does_not_depend_on_blocks_and_addresses(form, some, other):
    assert form.build(some).layout.text == form.build(other, seed=1).layout.text


@given(cache_forms(granularities=("block",)), st.integers(1, 3), st.data())
def test_some_heads_have_the_text_of_a_cache_that_has_no_others(form, factor, data):
    alone = replace(form, all_heads=form.heads, first_head=0)
    first = data.draw(st.integers(0, form.heads * (factor - 1)))
    among = replace(form, all_heads=form.heads * factor, first_head=first)

    assert among.build(2).layout.text == alone.build(3).layout.text


def test_a_layout_by_head_tells_tokens_in_heads_from_heads_in_tokens():
    texts = {
        order: CacheForm(order=order, all_heads=4).build(3).layout.text
        for order in ("LBHNC", "LBNHC", "BLHNC")
    }

    assert texts["LBHNC"] == texts["BLHNC"] != texts["LBNHC"]


@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_text_is_the_same_on_another_device(order):
    form = CacheForm(order=order)

    assert form.build(3).layout.text == form.build(3, device="meta").layout.text


def test_the_text_of_a_layout_differs_for_every_form():
    base = CacheForm(tokens=6, heads=3, content=6)
    changes = [{}]
    changes += [{"order": order} for order in VLLM_ORDERS if order != "LBNHC"]
    changes += [{"dtype": dtype} for dtype in DTYPES if dtype != base.dtype]
    changes += [{"layers": 3}, {"heads": 2}, {"tokens": 12}, {"content": 12}, {"heads": 6, "content": 3}]
    changes += [{"granularity": "token"}, {"granularity": "token", "order": "2BNHD"}]

    texts = [replace(base, **change).build(4).layout.text for change in changes]

    assert len(set(texts)) == len(texts)


def test_the_text_of_a_layout_depends_on_names_and_order_of_layers():
    tensors = list(CacheForm().build(4).tensors)

    texts = {
        KVLayout.from_block_views(layers, num_blocks=4, block_size=4).text
        for layers in (
            tensors,
            tensors[::-1],
            dict(zip("ab", tensors, strict=True)),
            dict(zip("ba", tensors, strict=True)),
        )
    }

    assert len(texts) == 4


def test_padding_between_blocks_changes_nothing_in_the_text():
    plain, padded = CacheForm().build(4), CacheForm(padding=8).build(4)

    assert plain.layout.text == padded.layout.text
    assert padded.layout.bytes_per_row == plain.layout.bytes_per_row


@given(cache_forms(), st.integers(1, 4))
def test_every_layer_of_its_own_is_whole_by_its_end_and_not_before(form, num_blocks):
    cache = form.build(num_blocks)
    layout = cache.layout

    assert list(layout.layer_ends) == [f"layer.{index}" for index in range(form.layers)]
    for index, end in enumerate(layout.layer_ends.values()):
        for storage in cache.storages:
            storage.zero_()
        cache.tensors[index].view(torch.uint8 if form.dtype.itemsize == 1 else form.dtype).fill_(1)
        touched = [
            number
            for number, plane in enumerate(layout.planes)
            for row in range(layout.num_rows)
            if cache.storages[plane.storage][plane.start(row) : plane.start(row) + plane.row_bytes].any()
        ]
        assert end == max(touched) + 1


@given(cache_forms())
def test_layers_in_tensors_of_their_own_end_one_after_the_other(form):
    ends = list(replace(form, separate=True).build(2).layout.layer_ends.values())

    assert ends == sorted(set(ends))
    assert ends[-1] == replace(form, separate=True).build(2).layout.num_planes


def test_a_layer_that_shares_the_tensor_of_another_has_no_end():
    first, second = torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8)

    layout = KVLayout.from_block_views({"a": first, "b": second, "c": first}, num_blocks=6, block_size=4)

    assert layout.layer_ends == {"a": 1, "b": 2}


def test_the_ends_follow_the_memory_not_the_names():
    memory = torch.zeros(2, 6, 2, 4, 8)

    layout = KVLayout.from_block_views({"b": memory[1], "a": memory[0]}, num_blocks=6, block_size=4)

    assert layout.layer_ends == {"a": 1, "b": 2}


def test_mla_of_three_dimensions_is_the_view_with_one_head():
    tensor = torch.zeros(10, 64, 576, dtype=torch.bfloat16)

    flat = KVLayout.from_block_views([tensor], num_blocks=10, block_size=64)
    view = KVLayout.from_block_views([tensor.unsqueeze(1)], num_blocks=10, block_size=64)

    assert flat.text == view.text
    assert [plane.row_bytes for plane in flat.planes] == [64 * 576 * 2]


@pytest.mark.parametrize(
    ("tensor", "kind"), [(torch.zeros(6, 4, 8), "heads"), (torch.zeros(6, 1, 4, 8), "pages")]
)
def test_tensors_without_heads_have_no_layout_by_head(tensor, kind):
    with pytest.raises(ValueError, match="no heads"):
        KVLayout.from_block_views([tensor], num_blocks=6, block_size=4, kind=kind, by_head=True)


def test_kernel_blocks_fold_into_blocks():
    tensor = torch.zeros(20, 2, 8, 4)

    layout = KVLayout.from_block_views([tensor], num_blocks=5, block_size=32)

    assert (layout.num_rows, layout.bytes_per_row) == (5, 4 * 2 * 8 * 4 * 4)


def test_opaque_pages_may_have_any_shape():
    page = torch.zeros(6, 1, 1, 1000, dtype=torch.int8)

    layout = KVLayout.from_block_views([page], num_blocks=6, block_size=16, kind="pages")

    assert layout.bytes_per_row == 1000
    with pytest.raises(ValueError, match='kind="pages"'):
        KVLayout.from_block_views([page], num_blocks=6, block_size=16)


@pytest.mark.parametrize(
    ("shape", "block_size", "row_bytes"),
    [
        ((2, 6, 4, 3, 8), None, [96, 96]),
        ((6, 2, 4, 3, 8), None, [96, 96]),
        ((6, 4, 3, 8), 4, [96]),
        ((6, 3, 4, 8), 4, [32, 32, 32]),
        ((6, 4, 8), None, [32]),
    ],
)
def test_slot_shapes_are_recognised(shape, block_size, row_bytes):
    layout = KVLayout.from_token_slots([torch.zeros(shape)], block_size=block_size)

    assert [plane.row_bytes for plane in layout.planes] == row_bytes
    assert (layout.num_blocks, layout.block_size, layout.num_rows, layout.tokens_per_row) == (6, 4, 24, 1)


def test_slots_at_one_stride_are_a_plane_of_one_level():
    plane = KVLayout.from_token_slots([torch.zeros(2, 6, 4, 3, 8)]).planes[0]

    assert plane.rows == RowStrides(96)


def test_keys_and_values_may_come_as_pairs():
    pairs = {"a": (torch.zeros(6, 4, 3, 8), torch.zeros(6, 4, 3, 8))}

    layout = KVLayout.from_token_slots(pairs, block_size=4)

    assert [plane.storage for plane in layout.planes] == [0, 1]


@pytest.mark.parametrize(
    ("shape", "block_size", "order", "message"),
    [
        ((2, 2, 4, 3, 8), None, None, "2BNHD or B2NHD"),
        ((6, 4, 4, 8), 4, None, "BNHD or BHNC"),
        ((6, 4, 3, 8), None, None, "order="),
        ((3, 6, 4, 3, 8), None, None, "unknown form"),
        ((6, 8), None, None, "unknown form"),
        ((6, 4, 8), None, "BHNC", "does not fit"),
        ((6, 4, 8), None, "BXD", "does not fit"),
        ((6, 4, 8), 16, None, "4 tokens per block"),
    ],
)
def test_shapes_that_cannot_be_read_are_refused(shape, block_size, order, message):
    with pytest.raises(ValueError, match=message):
        KVLayout.from_token_slots([torch.zeros(shape)], block_size=block_size, order=order)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(2, 6, 4, 3, 8), None], "layer 1 .* NoneType; expected a tensor"),
        ({"model.0": np.zeros((2, 6, 4, 3, 8))}, "layer 'model.0' .* ndarray; expected a tensor"),
        ([(torch.zeros(6, 4, 3, 8), 5)], "layer 0 .* int; expected a tensor"),
        ("cache", "layer 0 .* str; expected a tensor"),
        (7, "is a int; expected"),
        (iter([torch.zeros(2, 6, 4, 3, 8)]), "is a list_iterator; expected"),
    ],
    ids=["None", "array", "pair", "string", "number", "iterator"],
)
def test_values_that_are_no_tensors_are_refused(tensors, message):
    with pytest.raises(TypeError, match=message):
        KVLayout.from_token_slots(tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "no KV cache"),
        ([torch.zeros(7, 2, 4, 8)], "not a multiple"),
        ([torch.zeros(6, 8)], r"^KV cache tensor: shape \(6, 8\) is neither"),
        ([torch.zeros(6, 2, 8, 8)], "8 tokens"),
        ([torch.zeros(6, 2, 4, 0)], "empty"),
        ([torch.zeros(6, 1, 4, 8).expand(6, 2, 4, 8)], "expanded"),
        ([torch.zeros(1, 2, 4, 8).expand(6, 2, 4, 8)], "expanded"),
        ([torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8, device="meta")], "several devices"),
        ([torch.zeros(6, 4096, 4, 4)[..., ::2]], "32768 separate pieces"),
    ],
)
def test_block_views_that_cannot_be_read_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        KVLayout.from_block_views(tensors, num_blocks=6, block_size=4)


def test_layers_of_different_groups_over_the_same_bytes_are_refused():
    memory = torch.zeros(6 * 64)
    full, half = memory.view(6, 2, 4, 8), memory[32:].as_strided((5, 1, 4, 8), (64, 32, 8, 1))
    wide = memory.as_strided((3, 2, 4, 8), (128, 32, 8, 1))

    with pytest.raises(ValueError, match="one layout for each group"):
        KVLayout.from_block_views([full[:5], half], num_blocks=5, block_size=4)
    with pytest.raises(ValueError, match="one layout for each group"):
        KVLayout.from_block_views([full[:3], wide], num_blocks=3, block_size=4)


def test_two_storages_over_the_same_memory_do_not_bypass_the_check():
    memory = torch.zeros(6, 2, 4, 8)
    alias = torch.from_numpy(memory.numpy()[1:])

    with pytest.raises(ValueError, match="one layout for each group"):
        KVLayout.from_block_views([memory[:5], alias], num_blocks=5, block_size=4)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), min_size=2, max_size=4),
    st.integers(1, 4),
    st.sampled_from([(1, 0, 20), (1, 0, 7), (3, 6, 20), (2, 8, 30)]),
)
def test_overlap_is_found_exactly(bases, blocks, strides):
    per_block, row_stride, block_stride = strides
    planes = [Plane(0, base, size, RowStrides(block_stride, per_block, row_stride)) for base, size in bases]
    storage = torch.zeros(300, dtype=torch.uint8)
    count = torch.zeros(300)
    for plane, row in itertools.product(planes, range(blocks * per_block)):
        count[plane.start(row) : plane.start(row) + plane.row_bytes] += 1

    overlaps = bool((count > 1).any())
    if overlaps:
        with pytest.raises(ValueError, match="overlap"):
            check_overlap(planes, [storage], blocks * per_block)
    else:
        check_overlap(planes, [storage], blocks * per_block)
