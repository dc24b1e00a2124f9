"""Calls by tokens: for any mask and rows, the answer matches the loaded content."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import Namespace
from lmcache_async.testing.fakes import installed

BLOCKS, BLOCK_SIZE, CHUNK = 24, 4, 8


class BlockCache:
    """One layer in vLLM's form, [blocks, heads, block size, content]: a row is a block, not a token."""

    def __init__(self):
        self.tensor = torch.zeros(BLOCKS, 1, BLOCK_SIZE, 2)
        self.layout = KVLayout.from_block_views([self.tensor], num_blocks=BLOCKS, block_size=BLOCK_SIZE)

    def open(self):
        config = load_config(
            env={},
            extra={
                "chunk_size": CHUNK,
                "arena.max_bytes": 1 << 18,
                "arena.prefault": False,
                "arena.huge_pages": False,
            },
        )
        namespace = Namespace(
            model="m", weights="w", dtype=self.layout.dtype, layout=self.layout.text, chunk_size=CHUNK
        )
        return CacheEngine.open(config, layout=self.layout, namespace=namespace, registry=installed())

    def tokens_of(self, blocks):
        return self.tensor[list(blocks)].reshape(-1, 2)


@given(
    num_tokens=st.integers(0, 40),
    stored=st.integers(0, 40),
    skip=st.integers(0, 40),
    absent=st.sets(st.integers(0, 9)),
)
def test_the_mask_is_true_exactly_for_written_tokens(num_tokens, stored, skip, absent):
    skip, tokens = min(skip, num_tokens), np.arange(100, 100 + num_tokens)
    values = torch.arange(1, BLOCKS * BLOCK_SIZE + 1).float()

    async def check():
        cache = BlockCache()
        blocks = np.arange(10)
        cache.tensor[:10] = values[:40].view(10, 1, BLOCK_SIZE, 1)
        async with cache.open() as engine:
            await engine.store(tokens[:stored], blocks[: len(tokens[:stored]) // BLOCK_SIZE])
            cache.tensor.fill_(-7)
            rows = np.arange(20, 10, -1)[: num_tokens // BLOCK_SIZE]
            wanted = np.array([-1 if i in absent else row for i, row in enumerate(rows)], np.int64)
            mask = torch.arange(num_tokens) >= skip

            result = await engine.retrieve(tokens, wanted, mask=mask)

            present = [bool(there) for i, there in enumerate(result) if i // BLOCK_SIZE not in absent]
            text = "".join("T" if there else "F" for there in present)
            assert text.strip("F").strip("T") == "", f"{text} is not of the form F* T* F*"
            found = cache.tokens_of(rows)
            written = (found != -7).all(dim=1)
            whole = len(rows) * BLOCK_SIZE
            assert result[:whole].tolist() == written.tolist()
            assert not result[whole:].any()
            hit = torch.nonzero(result).flatten()
            assert torch.equal(found[hit, 0], values[hit])

    asyncio.run(check())


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        ([0, BLOCKS], ValueError, f"row {BLOCKS} .* 0 to {BLOCKS - 1}"),
        ([-2, 0], ValueError, "row -2"),
        ([0], ValueError, "8 tokens need 2 rows, but 1 were given"),
        ([0.0, 1.0], TypeError, "float"),
        (np.array([0, 2**64 - 1], np.uint64), ValueError, f"row {2**64 - 1} is out of bounds"),
        (np.array([0, 2**63], np.uint64), ValueError, f"row {2**63} is out of bounds"),
        ([0, 2**64 - 1], ValueError, f"row {2**64 - 1} is out of bounds"),
        ([0, 2**70], ValueError, f"row {2**70} is out of bounds"),
        ([-(2**70), 0], ValueError, f"row {-(2**70)} is out of bounds"),
        ([0, 0.5], TypeError, r"row 1 is 0.5 \(float\); expected integers"),
        ([[0], [1, 2]], ValueError, "inhomogeneous"),
        (
            torch.tensor([0, 1], dtype=torch.bfloat16),
            TypeError,
            "tensor of torch.bfloat16; expected integers",
        ),
        (np.array([True, False]), TypeError, "array of bool; expected integers"),
        ("01", TypeError, "expected integers"),
        (None, TypeError, "expected integers"),
    ],
    ids=str,
)
async def test_invalid_rows_are_refused(rows, error, match):
    cache = BlockCache()
    cache.tensor.fill_(1)
    async with cache.open() as engine:
        for verb in (engine.store, engine.retrieve):
            with pytest.raises(error, match=match):
                await verb(range(8), rows)

        assert engine.statistics().tiers["cpu"].chunks == 0


@pytest.mark.parametrize(
    "form",
    [torch.tensor, np.array, list, tuple, lambda values: [np.bool_(value) for value in values]],
    ids=["tensor", "array", "list", "tuple", "list of NumPy's"],
)
async def test_a_mask_may_be_of_any_form_that_holds_booleans(form):
    cache = BlockCache()
    values = [i >= 8 for i in range(20)]
    async with cache.open() as engine:
        await engine.store(range(20), range(5))
        result = await engine.retrieve(range(20), range(5), mask=form(values))

    assert result.tolist() == values


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.full((8,), float("nan")), "mask is a tensor of torch.float32; expected booleans"),
        (torch.ones(8, dtype=torch.int64), "mask is a tensor of torch.int64; expected booleans"),
        (np.full(8, np.nan), "mask is an array of float64; expected booleans"),
        (np.ones(8, np.uint8), "mask is an array of uint8; expected booleans"),
        ([1.0] * 8, r"mask value 0 is 1.0 \(float\); expected booleans"),
        ([True] * 7 + [None], "mask value 7 is None"),
        ("TTTTTTTT", "mask is a str; expected booleans"),
        (1, "mask is a int; expected booleans"),
    ],
    ids=["NaN", "int", "NaN array", "uint8", "floats", "none", "text", "number"],
)
async def test_a_mask_of_other_values_than_booleans_is_refused(mask, match):
    cache = BlockCache()
    async with cache.open() as engine:
        for verb in (engine.store, engine.retrieve):
            with pytest.raises(TypeError, match=match):
                await verb(range(8), range(2), mask=mask)

        assert engine.statistics().tiers["cpu"].chunks == 0


async def test_an_empty_mask_fits_no_tokens():
    cache = BlockCache()
    async with cache.open() as engine:
        assert (await engine.retrieve([], [], mask=[])).tolist() == []


async def test_the_callers_rows_are_not_changed():
    cache = BlockCache()
    rows = np.arange(5, dtype=np.int64)
    async with cache.open() as engine:
        await engine.store(range(20), rows, mask=torch.arange(20) >= 8)
        await engine.retrieve(range(20), rows, mask=torch.arange(20) >= 8)

    assert rows.tolist() == [0, 1, 2, 3, 4]
