"""Memory layout of one tensor by rows. Pure functions that read only shapes, strides and addresses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

MAX_PIECES = 8192
"""Maximum pieces of one row of one tensor. More pieces are single elements, in no supported layout."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor.

    Attributes:
        name: Its letter.
        size: Number of indices.
        stride: Bytes from one index to the next.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Rows:
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
class TensorView:
    """Tensor as rows of bytes.

    Attributes:
        name: Name of the layer; "" if it has none.
        storage: Index of the storage; equal for tensors of one storage.
        base: Bytes from the start of the storage to row 0.
        rows: Start offsets of the rows.
        content: Axes within one row, in the order of the tensor; axes of size 1 are left out, except `whole`.
        itemsize: Bytes of one element.
        dtype: Name of the element type, without `torch.`.
        whole: Name of the axis that no piece extends beyond; "" for no limit.
    """

    name: str
    storage: int
    base: int
    rows: Rows
    content: tuple[Axis, ...]
    itemsize: int
    dtype: str
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Maximal contiguous pieces of one row.

    Attributes:
        nbytes: Bytes of each piece.
        offsets: Bytes from the start of the row to each piece, in the order of the indices of `outer`.
        inner: Axes inside a piece, innermost first.
        outer: Axes across pieces, outermost first.
    """

    nbytes: int
    offsets: tuple[int, ...]
    inner: tuple[Axis, ...]
    outer: tuple[Axis, ...]


def view_of(
    name: str,
    tensor: torch.Tensor,
    axes: str,
    storages: Mapping[int, int],
    *,
    num_blocks: int | None,
    by_token: bool,
    whole: str = "",
) -> TensorView:
    """Describe a tensor as rows.

    Args:
        name: Name of the layer, for error messages.
        tensor: The tensor.
        axes: A letter for each dimension. `B` is the block, `N` the token in its block. All other letters are
            content, and so is `N` unless `by_token`.
        storages: Index of each storage by `storage_id`.
        num_blocks: Blocks of the cache, if dimension `B` may count several kernel blocks per block.
        by_token: A row is a token slot; else a block.
        whole: See `TensorView`.

    Raises:
        ValueError: A dimension is expanded (stride 0), or tokens extend over blocks.
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
    rows = Rows(block.stride)
    if by_token:
        rows = _token_rows(name, block, dims.pop("N"))
    content = tuple(axis for axis in dims.values() if axis.size > 1 or axis.name == whole)
    for axis in content:
        if axis.stride == 0:
            raise ValueError(
                f"{_title(name)}: dimension {axis.name} is expanded (stride 0), so its rows share bytes; expected a dense tensor"
            )
    return TensorView(
        name=name,
        storage=storages[storage_id(tensor)],
        base=int(tensor.storage_offset()) * itemsize,
        rows=rows,
        content=content,
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        whole=whole,
    )


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors of the same memory.

    For a meta tensor, which has no address, it identifies the storage object.
    """
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else storage.data_ptr()


def pieces_of(view: TensorView) -> Pieces:
    """Return the pieces of one row of `view`.

    Axes are merged only up to the distance between two rows, so the result does not depend on the number of
    blocks. With a single block, axes that are larger than this distance could appear contiguous.

    Raises:
        ValueError: A row has more than `MAX_PIECES` pieces.
    """
    nbytes = view.itemsize
    inner: list[Axis] = []
    outer: list[Axis] = []
    extends = True
    for axis in sorted(view.content, key=lambda axis: (axis.stride, axis.size)):  # `whole` may be of size 1
        if axis.size > 1 and extends and axis.stride == nbytes and nbytes * axis.size <= view.rows.pitch:
            nbytes *= axis.size
            inner.append(axis)
        elif axis.size > 1:
            outer.insert(0, axis)
        extends = extends and axis.name != view.whole
    count = 1
    for axis in outer:
        count *= axis.size
    if count > MAX_PIECES:
        described = ", ".join(f"{axis.name}={axis.size} at stride {axis.stride} B" for axis in view.content)
        raise ValueError(
            f"{_title(view.name)}: one row has {count} separate pieces of {nbytes} bytes ({described}); "
            f"the content dimension must be contiguous"
        )
    steps = [[index * axis.stride for index in range(axis.size)] for axis in outer]
    offsets = tuple(sum(combination) for combination in itertools.product(*steps))
    return Pieces(nbytes, offsets, tuple(inner), tuple(outer))


def guess_order(name: str, shape: Sequence[int], block_size: int | None) -> str:
    """Derive the axes of a tensor in slot mode from its shape.

    Raises:
        ValueError: The shape is unknown or ambiguous; the message requests `order`.
    """
    readings: list[str] = []
    if len(shape) == 5:
        readings = [order for order, kv in (("2BNHD", shape[0]), ("B2NHD", shape[1])) if kv == 2]
    elif len(shape) == 4 and block_size is not None:
        readings = [
            order for order, tokens in (("BNHD", shape[1]), ("BHNC", shape[2])) if tokens == block_size
        ]
    elif len(shape) == 3:
        readings = ["BND"]
    if len(readings) == 1:
        return readings[0]
    problem = f"could be {' or '.join(readings)}" if readings else "is of no form that we know"
    raise ValueError(
        f"{_title(name)}: shape {tuple(shape)} with block_size={block_size} {problem}; "
        f"set order= to one letter for each dimension (B block, N token in its block, other letters content)"
    )


def check_order(name: str, shape: Sequence[int], order: str) -> None:
    if (
        len(order) != len(shape)
        or len(set(order)) != len(order)
        or not {"B", "N"} <= set(order)
        or "R" in order
    ):
        raise ValueError(
            f"{_title(name)}: order={order!r} does not fit shape {tuple(shape)}; "
            f"expected a different letter for each dimension, with B and N and without R"
        )


def _token_rows(name: str, block: Axis, token: Axis) -> Rows:
    if token.size == 1 or block.stride == token.size * token.stride:
        return Rows(token.stride if token.size > 1 else block.stride)
    if block.size == 1:  # the stride of a single block is arbitrary
        return Rows(token.stride)
    if token.stride * (token.size - 1) >= block.stride:
        raise ValueError(
            f"{_title(name)}: tokens with a stride of {token.stride} bytes overlap blocks with a stride of {block.stride} bytes"
        )
    return Rows(block.stride, token.size, token.stride)


def _title(name: str) -> str:
    return f"KV cache of {name}" if name else "KV cache tensor"
