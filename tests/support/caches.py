"""The expected result of a gather and a scatter, by plain indexing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_async.testing.caches import PagedCache


def assign(cache: PagedCache, rows: Sequence[int], source: PagedCache, source_rows: Sequence[int]) -> None:
    """Copy rows by plain indexing.

    Args:
        cache: Cache to copy to.
        rows: Rows of this cache; -1 is skipped.
        source: Cache to copy from.
        source_rows: Row of `source` for each of `rows`.
    """
    for row, source_row in zip(rows, source_rows, strict=True):
        for target, origin in zip(cache.tensors, source.tensors, strict=True):
            if row >= 0:
                _row(cache, target, row).copy_(_row(source, origin, source_row))


def _row(cache: PagedCache, tensor: torch.Tensor, row: int) -> torch.Tensor:
    letters = cache.form.logical
    if cache.form.granularity == "block":
        ratio = cache.form.kernel_blocks
        return tensor[row * ratio : (row + 1) * ratio]
    block, token = divmod(row, cache.form.tokens)
    at_token = tensor.select(letters.index("N"), token)
    return at_token.select(letters.replace("N", "").index("B"), block)
