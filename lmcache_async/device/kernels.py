"""The Triton kernel that moves rows between the paged cache and staging memory.

Imported only where Triton is there; `movers` falls back to torch's own operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 2048
"""Words of one program at most: 16 KiB in words of 8 bytes, so that few programs fill the memory's pipes."""


@triton.jit(do_not_specialize=["num_entries"])  # type: ignore[untyped-decorator, unused-ignore]
def _move_rows(
    table: tl.tensor,  # int64: addresses of rows in the cache, -1 to skip; else also places and lengths in words
    staging: tl.tensor,  # words
    num_entries: tl.tensor,
    ROW_WORDS: tl.constexpr,
    TO_STAGING: tl.constexpr,
    UNIFORM: tl.constexpr,  # rows are all of ROW_WORDS, and lie in staging one after the other
    ALIGNMENT: tl.constexpr,  # what divides every address: it allows accesses of 128 bits
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    address = tl.load(table + entry)
    if UNIFORM:
        words = ROW_WORDS
        place = entry * ROW_WORDS
    else:
        place = tl.load(table + num_entries + entry)
        words = tl.load(table + 2 * num_entries + entry)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = column < words
    row = tl.multiple_of(address.to(staging.dtype), ALIGNMENT)
    there = tl.multiple_of(staging + place, ALIGNMENT)
    if address >= 0:
        if TO_STAGING:
            tl.store(there + column, tl.load(row + column, mask=present), mask=present)
        else:
            tl.store(row + column, tl.load(there + column, mask=present), mask=present)


def launch(
    table: torch.Tensor,
    staging: torch.Tensor,
    *,
    num_entries: int,
    row_words: int,
    uniform: bool,
    alignment: int,
    to_staging: bool,
) -> None:
    """Move `num_entries` rows on the current stream, in one launch.

    Args:
        table: int64 of shape (num_entries,) or, not `uniform`, (3 * num_entries,): see `_move_rows`.
        staging: Words, of one dimension.
        row_words: Words of a row; of the longest, if not `uniform`.
        alignment: What divides every row's address and every place in staging, in bytes; at most 16.
    """
    block = min(triton.next_power_of_2(row_words), BLOCK_WORDS)
    _move_rows[num_entries, triton.cdiv(row_words, block)](
        table,
        staging,
        num_entries,
        ROW_WORDS=row_words,
        TO_STAGING=to_staging,
        UNIFORM=uniform,
        ALIGNMENT=alignment,
        BLOCK=block,
        enable_fp_fusion=False,  # nothing is computed; unsaid, Triton 3.9 warns
        num_warps=max(1, min(4, block // 64)),
    )
