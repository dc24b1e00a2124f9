"""Planes of a paged cache: rows of tensors as pieces of bytes, adjacent pieces merged. Pure functions.

They read only shapes, strides and addresses.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int64s: TypeAlias = npt.NDArray[np.int64]
Places: TypeAlias = "dict[tuple[int, int], tuple[int, int]]"
"""(tensor, piece) -> (plane, byte offset in the row of the plane)."""

MAX_PIECES = 8192
"""Maximum pieces of one row of one tensor. More pieces are single elements, in no supported layout."""

_GROUPS_SHARE_MEMORY = "layers of several KV cache groups share memory; create one layout for each group"


@dataclass(frozen=True, slots=True)
class RowStrides:
    """Start offsets of rows: `block * block_stride + offset * row_stride`, in bytes.

    Rows at one uniform stride are described by one row per block.
    """

    block_stride: int
    rows_per_block: int = 1
    row_stride: int = 0

    @property
    def pitch(self) -> int:
        """Smallest distance between two rows in bytes, and so the maximum size of a row."""
        return self.block_stride if self.rows_per_block == 1 else self.row_stride


@dataclass(frozen=True, slots=True)
class Plane:
    """One contiguous piece of `row_bytes` bytes per row.

    Attributes:
        storage: Index into `KVLayout.storages`.
        base: Bytes from the start of the storage to row 0.
        rows: Start offsets of the rows from `base`.
    """

    storage: int
    base: int
    row_bytes: int
    rows: RowStrides

    def start(self, row: int) -> int:
        """Byte offset of `row` from the start of the storage."""
        block, offset = divmod(row, self.rows.rows_per_block)
        return self.base + block * self.rows.block_stride + offset * self.rows.row_stride


class Axis(NamedTuple):
    """One dimension of a tensor; the stride is in bytes."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Tensor as rows of maximal contiguous pieces.

    Attributes:
        content: Axes within one row, in the order of the tensor.
        inner: Axes inside a piece, innermost first.
        outer: Axes across pieces, outermost first.
        nbytes: Bytes of each piece.
        offsets: Bytes from the start of the row to each piece, in the order of the indices of `outer`.
        separate: Pieces are not merged with others.
    """

    name: str
    dtype: str
    storage: int
    base: int
    rows: RowStrides
    content: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    outer: tuple[Axis, ...]
    nbytes: int
    offsets: tuple[int, ...]
    separate: bool

    @classmethod
    def of(
        cls,
        name: str,
        tensor: torch.Tensor,
        axes: str,
        storage: int,
        *,
        num_blocks: int | None = None,
        by_token: bool = False,
        whole: str = "",
    ) -> TensorRows:
        """Describe the tensor of the layer `name`.

        Args:
            axes: A letter for each dimension. `B` is the block, `N` the token in its block. All other letters
                are content, and so is `N` unless `by_token`.
            num_blocks: Blocks of the cache, if dimension `B` may count several kernel blocks per block.
            by_token: A row is a token slot; else a block.
            whole: Axis that no piece extends beyond; "" for no limit.

        Raises:
            ValueError: A dimension is expanded (stride 0), tokens extend over blocks, or a row has more than
                `MAX_PIECES` pieces.
        """
        itemsize = tensor.element_size()
        dims = {
            letter: Axis(letter, size, stride * itemsize)
            for letter, size, stride in zip(axes, tensor.shape, tensor.stride(), strict=True)
        }
        block = dims.pop("B")
        if num_blocks is not None and block.size != num_blocks:
            ratio = block.size // num_blocks
            dims = {"R": Axis("R", ratio, block.stride), **dims}
            block = Axis("B", num_blocks, block.stride * ratio)
        rows = _token_rows(name, block, dims.pop("N")) if by_token else RowStrides(block.stride)
        content = tuple(axis for axis in dims.values() if axis.size > 1 or axis.name == whole)
        for axis in content:
            if axis.stride == 0:
                raise ValueError(
                    f"{title(name)}: dimension {axis.name} is expanded (stride 0), so its rows share bytes; "
                    f"expected a dense tensor"
                )
        nbytes, inner, outer = _split(content, itemsize, rows.pitch, whole)
        count = math.prod(axis.size for axis in outer)
        if count > MAX_PIECES:
            described = ", ".join(f"{axis.name}={axis.size} at stride {axis.stride} B" for axis in content)
            raise ValueError(
                f"{title(name)}: one row has {count} separate pieces of {nbytes} bytes ({described}); "
                f"the content dimension must be contiguous"
            )
        steps = [range(0, axis.size * axis.stride, axis.stride) for axis in outer]
        return cls(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            storage=storage,
            base=int(tensor.storage_offset()) * itemsize,
            rows=rows,
            content=content,
            inner=inner,
            outer=outer,
            nbytes=nbytes,
            offsets=tuple(map(sum, itertools.product(*steps))),
            separate=bool(whole),
        )


def _split(
    content: Sequence[Axis], itemsize: int, pitch: int, whole: str
) -> tuple[int, tuple[Axis, ...], tuple[Axis, ...]]:
    """Return the bytes of a piece, the axes inside it, and those across pieces.

    Axes are merged only up to the distance between two rows, so the result does not depend on the number of
    blocks. With a single block, axes that are larger than this distance could appear contiguous.
    """
    nbytes = itemsize
    inner: list[Axis] = []
    outer: list[Axis] = []
    extends = True
    for axis in sorted(content, key=lambda axis: (axis.stride, axis.size)):  # `whole` may be of size 1
        if axis.size > 1 and extends and axis.stride == nbytes and nbytes * axis.size <= pitch:
            nbytes *= axis.size
            inner.append(axis)
        elif axis.size > 1:
            outer.insert(0, axis)
        extends = extends and axis.name != whole
    return nbytes, tuple(inner), tuple(outer)


def _token_rows(name: str, block: Axis, token: Axis) -> RowStrides:
    if token.size == 1 or block.stride == token.size * token.stride:
        return RowStrides(token.stride if token.size > 1 else block.stride)
    if block.size == 1:  # the stride of a single block is arbitrary
        return RowStrides(token.stride)
    if token.stride * (token.size - 1) >= block.stride:
        raise ValueError(
            f"{title(name)}: tokens with a stride of {token.stride} bytes overlap blocks with a stride of "
            f"{block.stride} bytes"
        )
    return RowStrides(block.stride, token.size, token.stride)


def title(name: str) -> str:
    """Return the start of an error message about the tensor of a layer."""
    return f"KV cache of {name}" if name else "KV cache tensor"


def merge(tensors: Sequence[TensorRows]) -> tuple[list[Plane], Places]:
    """Merge the pieces of all tensors into planes.

    Adjacent pieces of equal strides become one plane, as long as its rows are not longer than the distance
    between two rows.

    Returns:
        The planes by storage and base, and the plane and offset of each (tensor, piece).
    """
    found = [
        (tensor.storage, tensor.base + offset, index, piece)
        for index, tensor in enumerate(tensors)
        for piece, offset in enumerate(tensor.offsets)
    ]
    planes: list[Plane] = []
    places: Places = {}
    for storage, base, index, piece in sorted(found):
        tensor = tensors[index]
        new = Plane(storage, base, tensor.nbytes, tensor.rows)
        last = planes[-1] if planes else None
        if last is not None and not tensor.separate and _are_adjacent(last, new):
            places[index, piece] = (len(planes) - 1, last.row_bytes)
            planes[-1] = Plane(storage, last.base, last.row_bytes + new.row_bytes, new.rows)
        else:
            places[index, piece] = (len(planes), 0)
            planes.append(new)
    return planes, places


def _are_adjacent(last: Plane, new: Plane) -> bool:
    return (last.storage, last.rows, last.base + last.row_bytes) == (
        new.storage,
        new.rows,
        new.base,
    ) and last.row_bytes + new.row_bytes <= new.rows.pitch


def summary(planes: Sequence[Plane]) -> str:
    runs = itertools.groupby(plane.row_bytes for plane in planes)
    return "+".join(f"{len(list(run))}x{nbytes}B" for nbytes, run in runs)


def digest(tensors: Sequence[TensorRows], places: Mapping[tuple[int, int], tuple[int, int]]) -> str:
    """Return a hash of the position of each element of each layer in the payload, as 32 hex digits.

    It covers the names, dtypes, axes and positions within planes.
    """
    structure = [
        [
            tensor.name,
            tensor.dtype,
            [[axis.name, axis.size] for axis in tensor.content if axis.size > 1],
            [axis.name for axis in tensor.inner],
            [axis.name for axis in tensor.outer],
            [places[index, piece] for piece in range(len(tensor.offsets))],
        ]
        for index, tensor in enumerate(tensors)
    ]
    return hashlib.sha256(json.dumps(structure).encode()).hexdigest()[:32]


def check_overlap(planes: Sequence[Plane], storages: Sequence[torch.Tensor], num_rows: int) -> None:
    """Check that no two rows share a byte, in one plane or in two.

    Planes of equal strides are compared exactly. The address ranges of planes of different strides must be
    disjoint.

    Raises:
        ValueError: Two rows share a byte.
    """
    # Two storages may map the same memory, so addresses are compared.
    origins = [0 if storage.is_meta else storage.data_ptr() for storage in storages]
    groups: dict[tuple[int, RowStrides], list[Plane]] = {}
    for plane in planes:
        _check_plane(plane, num_rows)
        space = plane.storage if storages[plane.storage].is_meta else 0
        groups.setdefault((space, plane.rows), []).append(plane)
    for (_, rows), members in groups.items():
        bases = np.array([origins[plane.storage] + plane.base for plane in members], np.int64)
        sizes = np.array([plane.row_bytes for plane in members], np.int64)
        for index in range(len(members) - 1):
            if _meets(bases[index + 1 :] - bases[index], sizes[index], sizes[index + 1 :], rows, num_rows):
                raise ValueError(
                    f"rows of {sizes[index]} bytes at offset {members[index].base} overlap those of another plane: "
                    f"{_GROUPS_SHARE_MEMORY}"
                )
    for ((space, _), some), ((other, _), others) in itertools.combinations(groups.items(), 2):
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


def _meets(distance: Int64s, size: int, sizes: Int64s, rows: RowStrides, num_rows: int) -> bool:
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
                f"{_GROUPS_SHARE_MEMORY}"
            )
        ends[side] = max(ends[side], stop)
