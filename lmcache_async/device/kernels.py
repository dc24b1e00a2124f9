"""Triton kernel that copies rows between the paged cache and staging memory.

Imported by `movers`, which falls back to torch operations if Triton is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 8192
"""Maximum words that a program copies at once: 64 KiB in 8-byte words."""

FLIGHT_BYTES = 1 << 20
"""Bytes that all programs of a launch copy at once. On an H100, 16 programs of 64 KiB move 450 GB/s, eight times what the
bus needs. A program for each row moves 1 TB/s, but takes four times as much of the multiprocessors' time from the
model, and slows down the copies over the bus, which read and write the same memory."""


@triton.jit(do_not_specialize=["num_entries"])  # type: ignore[untyped-decorator, unused-ignore]
def _move_rows(
    table: tl.tensor,  # int64: row addresses, -1 to skip; unless UNIFORM also offsets and lengths, see launch
    staging: tl.tensor,  # words
    num_entries: tl.tensor,
    ROW_WORDS: tl.constexpr,
    TO_STAGING: tl.constexpr,
    UNIFORM: tl.constexpr,  # all rows have ROW_WORDS words and are consecutive in staging
    ALIGNMENT: tl.constexpr,  # common divisor of all addresses, in bytes; 16 allows 128-bit accesses
    BLOCK: tl.constexpr,
) -> None:
    steps = tl.cdiv(ROW_WORDS, BLOCK)
    for item in range(tl.program_id(0), num_entries * steps, tl.num_programs(0)):
        entry = (item // steps).to(tl.int64)
        column = (item % steps) * BLOCK + tl.arange(0, BLOCK)
        address = tl.load(table + entry)
        if UNIFORM:
            words = ROW_WORDS
            place = entry * ROW_WORDS
        else:
            place = tl.load(table + num_entries + entry)
            words = tl.load(table + 2 * num_entries + entry)
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
    """Copy `num_entries` rows on the current stream, in one launch.

    Args:
        table: int64 of shape (num_entries,) if `uniform`, else (3 * num_entries,): addresses of the rows in
            the cache (-1 to skip), their offsets in staging and their lengths, both in words.
        staging: One-dimensional tensor of words.
        row_words: Words of a row; of the longest row if not `uniform`.
    """
    block = min(triton.next_power_of_2(row_words), BLOCK_WORDS)
    programs = max(1, FLIGHT_BYTES // (block * staging.element_size()))
    _move_rows[min(num_entries * triton.cdiv(row_words, block), programs),](
        table,
        staging,
        num_entries,
        ROW_WORDS=row_words,
        TO_STAGING=to_staging,
        UNIFORM=uniform,
        ALIGNMENT=alignment,
        BLOCK=block,
        enable_fp_fusion=False,  # no arithmetic; Triton 3.9 warns if this is not set
        num_warps=max(1, min(4, block // 64), block // 512),
    )
