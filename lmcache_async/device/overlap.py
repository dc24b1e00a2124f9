"""Check that no two rows of a layout share a byte. Pure functions."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lmcache_async.device.planes import Plane
    from lmcache_async.device.views import Rows

Int64s: TypeAlias = npt.NDArray[np.int64]


def check_overlap(planes: Sequence[Plane], storages: Sequence[torch.Tensor], num_rows: int) -> None:
    """Check that no two rows share a byte, in one plane or in two.

    Planes of equal strides are compared exactly. The address ranges of planes of different strides must be
    disjoint.

    Args:
        planes: Planes of the layout.
        storages: Storages of the planes; uint8.
        num_rows: Rows of the paged cache.

    Raises:
        ValueError: Two rows share a byte.
    """
    # Two storages may map the same memory, so addresses are compared.
    origins = [0 if storage.is_meta else storage.data_ptr() for storage in storages]
    groups: dict[tuple[int, Rows], list[Plane]] = {}
    for plane in planes:
        _check_plane(plane, num_rows)
        space = plane.storage if storages[plane.storage].is_meta else 0
        groups.setdefault((space, plane.rows), []).append(plane)
    for (_, rows), members in groups.items():
        bases = np.array([origins[plane.storage] + plane.base for plane in members], np.int64)
        sizes = np.array([plane.row_bytes for plane in members], np.int64)
        for index in range(len(members) - 1):
            if _meets(bases[index + 1 :] - bases[index], sizes[index], sizes[index + 1 :], rows, num_rows):
                raise ValueError(_shared(members[index]))
    for ((space, _), some), ((other, _), others) in combinations(groups.items(), 2):
        if space == other:
            _check_apart(some, others, origins, num_rows)


def _check_plane(plane: Plane, num_rows: int) -> None:
    rows = plane.rows
    block_bytes = (rows.rows_per_block - 1) * rows.row_stride + plane.row_bytes
    if num_rows > 1 and (plane.row_bytes > rows.pitch or block_bytes > rows.block_stride):
        raise ValueError(
            f"rows of {plane.row_bytes} bytes at a stride of {rows.pitch} bytes overlap; expected a tensor without"
            " expanded dimensions"
        )


def _meets(distance: Int64s, size: int, sizes: Int64s, rows: Rows, num_rows: int) -> bool:
    """Whether a row of the first plane overlaps one of another plane, with a base `distance` bytes higher."""
    per_block = rows.rows_per_block
    blocks = -(-num_rows // per_block)
    step = rows.row_stride
    span = (per_block - 1) * step
    stride = max(rows.block_stride, 1)  # the stride of a single block may be 0
    # A row of the other plane, k blocks and t rows on, starts at distance + k * block_stride + t * step.
    # Only the values of k that bring this nearest to 0 can put it within the span of a block, each with two
    # values of t.
    nearest = -distance // stride
    reach = 1 + (span + int(max(size, sizes.max()))) // stride
    for k_shift in range(-reach, reach + 2):
        k = nearest + k_shift
        there = distance + k * stride
        in_range = np.abs(k) < blocks
        nearest_row = -there // step if step else np.zeros_like(there)
        for t_shift in (0, 1) if step else (0,):
            t = nearest_row + t_shift
            start = there + t * step
            hits = in_range & (np.abs(t) < per_block) & (start < size) & (start + sizes > 0)
            if hits.any():
                return True
    return False


def _check_apart(
    some: Sequence[Plane], others: Sequence[Plane], origins: Sequence[int], num_rows: int
) -> None:
    extents = sorted(
        (
            origins[plane.storage] + plane.base,
            origins[plane.storage] + plane.start(num_rows - 1) + plane.row_bytes,
            side,
        )
        for side, planes in enumerate((some, others))
        for plane in planes
    )
    ends = [0, 0]
    for start, stop, side in extents:
        if start < ends[1 - side]:
            raise ValueError(
                f"planes with strides of {some[0].rows.block_stride} and {others[0].rows.block_stride} bytes overlap: "
                f"layers of several KV cache groups share memory; create one layout for each group"
            )
        ends[side] = max(ends[side], stop)


def _shared(plane: Plane) -> str:
    return (
        f"rows of {plane.row_bytes} bytes at offset {plane.base} overlap those of another plane: "
        f"layers of several KV cache groups share memory; create one layout for each group"
    )
