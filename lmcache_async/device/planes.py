"""Planes: the pieces of all tensors, with adjacent pieces merged. Pure functions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lmcache_async.device.views import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_async.device.views import Pieces, TensorView

Places: TypeAlias = "dict[tuple[int, int], tuple[int, int]]"
"""(tensor, piece) -> (plane, byte offset in the row of the plane)."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One contiguous piece of `row_bytes` bytes per row.

    Row r starts at `base + r // rows_per_block * block_stride + r % rows_per_block * row_stride`.

    Attributes:
        storage: Index into `KVLayout.storages`.
        base: Bytes from the start of the storage to row 0.
        row_bytes: Bytes of one row.
        block_stride: Bytes between blocks; bytes between rows if a block is one row.
        rows_per_block: Rows of a block; 1 if all rows have one stride.
        row_stride: Bytes between the rows of a block.
    """

    storage: int
    base: int
    row_bytes: int
    block_stride: int
    rows_per_block: int = 1
    row_stride: int = 0

    def start(self, row: int) -> int:
        """Byte offset of `row` from the start of the storage."""
        block, offset = divmod(row, self.rows_per_block)
        return self.base + block * self.block_stride + offset * self.row_stride

    @property
    def rows(self) -> Rows:
        return Rows(self.block_stride, self.rows_per_block, self.row_stride)


def merge(views: Sequence[TensorView], pieces: Sequence[Pieces]) -> tuple[list[Plane], Places]:
    """Merge the pieces of all tensors into planes.

    Adjacent pieces of equal strides become one plane, as long as its rows are not longer than the distance
    between two rows. Pieces of a view with a `whole` axis are planes of their own.

    Args:
        views: Tensors as rows of bytes.
        pieces: Pieces of one row of each view.

    Returns:
        The planes by storage and base, and the plane and offset of each (tensor, piece).
    """
    found = [
        (view.storage, view.base + offset, tensor, piece)
        for tensor, view in enumerate(views)
        for piece, offset in enumerate(pieces[tensor].offsets)
    ]
    planes: list[Plane] = []
    places: Places = {}
    for storage, base, tensor, piece in sorted(found):
        rows, nbytes = views[tensor].rows, pieces[tensor].nbytes
        last = planes[-1] if planes else None
        joins = (
            last is not None
            and not views[tensor].whole
            and (last.storage, last.rows, last.base + last.row_bytes) == (storage, rows, base)
            and last.row_bytes + nbytes <= rows.pitch
        )
        if last is not None and joins:
            places[tensor, piece] = (len(planes) - 1, last.row_bytes)
            nbytes += last.row_bytes
            planes.pop()
            base = last.base
        else:
            places[tensor, piece] = (len(planes), 0)
        planes.append(Plane(storage, base, nbytes, rows.block_stride, rows.rows_per_block, rows.row_stride))
    return planes, places


def summary(planes: Sequence[Plane]) -> str:
    runs: list[list[int]] = []
    for plane in planes:
        if runs and runs[-1][1] == plane.row_bytes:
            runs[-1][0] += 1
        else:
            runs.append([1, plane.row_bytes])
    return "+".join(f"{count}x{nbytes}B" for count, nbytes in runs)


def digest(
    views: Sequence[TensorView], pieces: Sequence[Pieces], places: Mapping[tuple[int, int], tuple[int, int]]
) -> str:
    """Hash of the position of each element of each layer in the payload, as 32 hex digits.

    It covers the names, dtypes, axes and positions within planes.
    """
    structure = [
        [
            view.name,
            view.dtype,
            [[axis.name, axis.size] for axis in view.content if axis.size > 1],
            [axis.name for axis in part.inner],
            [axis.name for axis in part.outer],
            [places[tensor, piece] for piece in range(len(part.offsets))],
        ]
        for tensor, (view, part) in enumerate(zip(views, pieces, strict=True))
    ]
    return hashlib.sha256(json.dumps(structure).encode()).hexdigest()[:32]
