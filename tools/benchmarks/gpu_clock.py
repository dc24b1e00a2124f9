"""Triton kernel that reads the clocks of the multiprocessors."""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAMS = 2048
"""Programs of a launch, enough for one on each multiprocessor."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def read(clocks: tl.tensor) -> None:
    unit = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    entry = clocks + 2 * tl.program_id(0)
    tl.store(entry, unit.to(tl.int64))
    tl.store(entry + 1, cycles)
