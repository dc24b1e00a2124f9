"""How one tensor's bytes lie in memory, row by row. Pure: only shapes, strides and addresses are read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

MAX_PIECES = 8192
"""Pieces of one row of one tensor. More means that single elements are scattered: no layout that we know."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: its letter, its size, and the bytes from one index to the next."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Where rows start: `block * block_stride + offset * row_stride`, `rows_per_block` rows a block.

    Rows at one uniform stride have one row a block.
    """

    block_stride: int
    rows_per_block: int = 1
    row_stride: int = 0

    @property
    def pitch(self) -> int:
        """The least distance of two rows: what one row may take at most."""
        return self.block_stride if self.rows_per_block == 1 else self.row_stride


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as rows of bytes.

    Attributes:
        name: Its layer's name; "" where there is none.
        storage: Its storage, any hashable; two tensors of one storage have equal ones.
        base: Bytes from the storage's start to row 0.
        rows: Where its rows start.
        content: What one row holds, in the tensor's own order; axes of size 1 are left out.
        itemsize: Bytes of one element.
        dtype: The element's name, without `torch.`.
    """

    name: str
    storage: int
    base: int
    rows: Rows
    content: tuple[Axis, ...]
    itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """The maximal contiguous pieces of one row.

    Attributes:
        nbytes: Bytes of each piece.
        offsets: Bytes from the row's start to each piece, in the order of `outer`'s indices.
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
) -> TensorView:
    """Read `tensor`, whose dimensions are named by the letters of `axes`, as rows.

    `B` is the block, `N` the token in its block; every other letter is content, and so is `N` unless
    `by_token`. With `num_blocks`, dimension `B` may hold several kernel blocks a block.
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
    content = tuple(axis for axis in dims.values() if axis.size > 1)
    for axis in content:
        if axis.stride == 0:
            raise ValueError(
                f"{_title(name)}: dimension {axis.name} is expanded (stride 0); its bytes repeat"
            )
    return TensorView(
        name=name,
        storage=storages[storage_id(tensor)],
        base=int(tensor.storage_offset()) * itemsize,
        rows=rows,
        content=content,
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors of one memory; meta tensors have no address, but a storage object."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else storage.data_ptr()


def pieces_of(view: TensorView) -> Pieces:
    """The pieces of one row of `view`.

    Axes are merged only up to the distance of two rows, so the answer does not change with the number
    of blocks: with one block, what lies between blocks elsewhere would look contiguous.
    """
    nbytes = view.itemsize
    inner: list[Axis] = []
    outer: list[Axis] = []
    for axis in sorted(view.content, key=lambda axis: axis.stride):
        if axis.stride == nbytes and nbytes * axis.size <= view.rows.pitch:
            nbytes *= axis.size
            inner.append(axis)
        else:
            outer.insert(0, axis)
    count = 1
    for axis in outer:
        count *= axis.size
    if count > MAX_PIECES:
        described = ", ".join(f"{axis.name}={axis.size} at stride {axis.stride} B" for axis in view.content)
        raise ValueError(
            f"{_title(view.name)}: one row falls into {count} pieces of {nbytes} B ({described}); "
            f"the content dimension must be contiguous"
        )
    steps = [[index * axis.stride for index in range(axis.size)] for axis in outer]
    offsets = tuple(sum(combination) for combination in itertools.product(*steps))
    return Pieces(nbytes, offsets, tuple(inner), tuple(outer))


def guess_order(name: str, shape: Sequence[int], block_size: int | None) -> str:
    """The axes of a tensor in slot mode, where the shape leaves one reading.

    Raises:
        ValueError: No reading, or more than one; the message asks for `order`.
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
        f"say which by order=, a letter for each dimension (B block, N token in its block, the rest content)"
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
            f"give each dimension its own letter, B and N among them (R is taken)"
        )


def _token_rows(name: str, block: Axis, token: Axis) -> Rows:
    if token.size == 1 or block.stride == token.size * token.stride:
        return Rows(token.stride if token.size > 1 else block.stride)
    if block.size == 1:  # its stride says nothing
        return Rows(token.stride)
    if token.stride * (token.size - 1) >= block.stride:
        raise ValueError(
            f"{_title(name)}: tokens at stride {token.stride} B reach over blocks at stride {block.stride} B"
        )
    return Rows(block.stride, token.size, token.stride)


def _title(name: str) -> str:
    return f"KV cache of {name}" if name else "KV cache tensor"
