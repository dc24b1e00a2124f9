"""Layout of a paged KV cache as planes of rows. It defines the bytes of a chunk's payload and their order.

A plane is one contiguous piece of bytes per row, at regular strides. The payload of a chunk in rows r0..rk is
`[plane][row]`: for each plane, in a fixed order, the pieces of these rows. Elements are not interpreted, so
quantised and opaque pages need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from lmcache_async.device.planes import Plane, TensorRows, check_overlap, digest, merge, summary, title

if TYPE_CHECKING:
    import torch

__all__ = ["Granularity", "KVLayout", "Layer", "Layers", "Plane"]

Granularity: TypeAlias = Literal["block", "token"]
Layer: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
Layers: TypeAlias = Mapping[str, Layer] | Sequence[Layer]
"""Tensors by layer name, or in layer order. K and V of a layer may be a pair of tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class KVLayout:
    """Layout of a paged KV cache on one device. It keeps the memory of the cache alive.

    Attributes:
        planes: Planes in payload order.
        storages: Complete storages of the tensors: uint8 of shape (storage bytes,).
        num_blocks: Blocks of the cache.
        block_size: Tokens of a block.
        granularity: Whether a row is a block or a token slot (`block * block_size + offset`).
        dtype: Name of the element type; several are joined by `+`.
        text: Meaning of the payload bytes. Equal for two caches if and only if payloads of one can be loaded
            into the other. Independent of addresses, device and number of blocks. Part of the namespace.
        layer_ends: For each named layer, the number of leading planes that contain all of it. Layers that
            share the KV of an earlier layer are left out.
        bytes_per_row: Payload bytes of one row.
    """

    planes: tuple[Plane, ...]
    storages: tuple[torch.Tensor, ...]
    num_blocks: int
    block_size: int
    granularity: Granularity
    dtype: str
    text: str
    layer_ends: Mapping[str, int]
    bytes_per_row: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_row", sum(plane.row_bytes for plane in self.planes))

    @classmethod
    def from_block_views(
        cls,
        tensors: Layers,
        *,
        num_blocks: int,
        block_size: int,
        kind: Literal["heads", "pages"] = "heads",
        by_head: bool = False,
    ) -> Self:
        """Create a layout of views [B, H, N, C], or [B, N, C] for MLA, as vLLM has them. A row is a block.

        The physical order of the dimensions is arbitrary. Two layers with the same tensor are stored once.

        Args:
            tensors: One tensor or one pair of tensors per layer.
            num_blocks: Blocks of the cache. Dimension 0 may count kernel blocks, several per block.
            block_size: Tokens of a block.
            kind: With "pages", the dimensions after the block dimension are opaque and may have any shape.
            by_head: No piece extends beyond the heads. Views of the same number of heads then have the same text and
                the same payload, whether they are all heads of their tensors or some of them (`tensor[:, 2:4]`). Views
                without heads are refused.

        Raises:
            TypeError: A value is not a tensor.
            ValueError: A shape is not one of these, or two rows share bytes.
        """
        named = _named(tensors)
        for name, tensor in named:
            _check_blocks(name, tensor, num_blocks, block_size, kind)
            if by_head and (kind != "heads" or tensor.dim() != 4):
                raise ValueError(
                    f"{title(name)}: shape {tuple(tensor.shape)} has no heads, expected [B, H, N, C]"
                )
        storages = _storages(named)
        rows = [
            TensorRows.of(
                name,
                tensor,
                _block_axes(tensor.dim(), kind),
                list(storages).index(_storage_id(tensor)),
                num_blocks=num_blocks,
                whole="H" if by_head else "",
            )
            for name, tensor in _distinct(named)
        ]
        return cls._of(rows, storages, num_blocks, block_size, "block")

    @classmethod
    def from_token_slots(
        cls, tensors: Layers, *, order: str | None = None, block_size: int | None = None
    ) -> Self:
        """Create a layout of paged tensors as attention code uses them. A row is a token slot.

        Supported are [2, B, N, H, D], [B, 2, N, H, D], pairs of [B, N, H, D], [B, N, D] for MLA, and
        [B, H, N, C] views.

        Args:
            tensors: One tensor or one pair of tensors per layer.
            order: A letter for each dimension, e.g. `2BNHD` or `BHNC`: B is the block, N the token in its
                block. None derives it from the shape, with `block_size` if necessary.
            block_size: Tokens of a block, if `order` is not given.

        Raises:
            TypeError: A value is not a tensor.
            ValueError: A shape is unknown or ambiguous, or two rows share bytes.
        """
        named = _named(tensors)
        storages = _storages(named)
        sizes: set[tuple[int, int]] = set()
        rows = []
        for name, tensor in _distinct(named):
            axes = order or _guess_order(name, tensor.shape, block_size)
            _check_order(name, tensor.shape, axes)
            sizes.add((tensor.shape[axes.index("B")], tensor.shape[axes.index("N")]))
            storage = list(storages).index(_storage_id(tensor))
            rows.append(TensorRows.of(name, tensor, axes, storage, by_token=True))
        if len(sizes) > 1:
            raise ValueError(
                f"layers differ in (num_blocks, block_size): {sorted(sizes)}; expected the same in all layers"
            )
        num_blocks, found = sizes.pop()
        if block_size not in (None, found):
            raise ValueError(f"block_size is {block_size}, but the tensors have {found} tokens per block")
        return cls._of(rows, storages, num_blocks, found, "token")

    @classmethod
    def _of(
        cls,
        tensors: Sequence[TensorRows],
        storages: Mapping[int, torch.Tensor],
        num_blocks: int,
        block_size: int,
        granularity: Granularity,
    ) -> Self:
        memory = tuple(storages.values())
        planes, places = merge(tensors)
        check_overlap(planes, memory, num_blocks * (block_size if granularity == "token" else 1))
        dtype = "+".join(sorted({tensor.dtype for tensor in tensors}))
        head = f"{granularity};{dtype};block_size={block_size};planes={summary(planes)}"
        text = f"{head};structure={digest(tensors, places)}"
        ends: dict[str, int] = {}
        for (index, _), (plane, _) in places.items():
            name = tensors[index].name
            ends[name] = max(ends.get(name, 0), plane + 1)
        return cls(tuple(planes), memory, num_blocks, block_size, granularity, dtype, text, ends)

    @property
    def device(self) -> torch.device:
        return self.storages[0].device

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.block_size // self.tokens_per_row

    @property
    def tokens_per_row(self) -> int:
        return self.block_size if self.granularity == "block" else 1

    @property
    def num_planes(self) -> int:
        return len(self.planes)

    def payload_bytes(self, num_rows: int) -> int:
        """Return the payload bytes of a chunk in `num_rows` rows."""
        return self.bytes_per_row * num_rows


def named_tensors(tensors: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of all `Layers` in order, with their names; "" without names.

    Raises:
        TypeError: A value is not a tensor.
    """
    import torch  # here, so that modules that only need the type start without torch

    # An iterator can be read only once.
    if not isinstance(tensors, Iterable) or isinstance(tensors, Iterator):
        raise TypeError(
            f"the KV cache is a {type(tensors).__name__}; expected a list or a mapping of tensors"
        )
    layers = tensors.items() if isinstance(tensors, Mapping) else (("", layer) for layer in tensors)
    named: list[tuple[str, torch.Tensor]] = []
    for position, (name, layer) in enumerate(layers):
        if isinstance(layer, torch.Tensor):
            named.append((name, layer))
            continue
        parts = layer if isinstance(layer, Sequence) else [layer]
        for index, part in enumerate(parts):
            if not isinstance(part, torch.Tensor):
                raise TypeError(
                    f"layer {name or position!r} of the KV cache has a {type(part).__name__}; expected a tensor, or a pair"
                    " of tensors for K and V"
                )
            named.append((f"{name}[{index}]" if name else "", part))
    return named


def _named(tensors: Layers) -> list[tuple[str, torch.Tensor]]:
    named = named_tensors(tensors)
    if not named:
        raise ValueError("no KV cache tensors were given")
    devices = {str(tensor.device) for _, tensor in named}
    if len(devices) > 1:
        raise ValueError(
            f"the KV cache tensors are on several devices: {sorted(devices)}; expected one device"
        )
    for name, tensor in named:
        if tensor.numel() == 0:
            raise ValueError(f"the KV cache of {name or 'a layer'} is empty: shape {tuple(tensor.shape)}")
    return named


def _storages(named: Sequence[tuple[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Return the complete storages of the tensors, as bytes, by `_storage_id`."""
    import torch

    found: dict[int, torch.Tensor] = {}
    for _, tensor in named:
        if _storage_id(tensor) not in found:
            storage = tensor.untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[_storage_id(tensor)] = empty.set_(storage, 0, (storage.nbytes(),), (1,))
    return found


def _storage_id(tensor: torch.Tensor) -> int:
    """Return the address of the storage; for a meta tensor, which has none, that of the storage object."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if tensor.is_meta else storage.data_ptr()


def _distinct(named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Leave out layers that share the KV of an earlier layer: same memory, shape, strides and dtype."""
    first: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        form = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first.setdefault((_storage_id(tensor), tensor.storage_offset(), *form), (name, tensor))
    return list(first.values())


def _block_axes(dim: int, kind: str) -> str:
    if kind == "pages":
        return "B" + "cdefghij"[: dim - 1]
    return {4: "BHNC", 3: "BNC"}[dim]


def _check_blocks(name: str, tensor: torch.Tensor, num_blocks: int, block_size: int, kind: str) -> None:
    shape = tuple(tensor.shape)
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
    if shape[:1] == () or shape[0] % num_blocks:
        raise ValueError(
            f"{title(name)}: dimension 0 of shape {shape} is not a multiple of num_blocks={num_blocks}"
        )
    if kind == "pages":
        return
    if len(shape) not in (3, 4):
        raise ValueError(
            f'{title(name)}: shape {shape} is neither [B, H, N, C] nor [B, N, C]; opaque pages need kind="pages"'
        )
    tokens = shape[0] // num_blocks * shape[-2]
    if tokens != block_size:
        raise ValueError(
            f"{title(name)}: shape {shape} with {num_blocks} blocks has {tokens} tokens per block, "
            f'expected block_size={block_size}; opaque pages need kind="pages"'
        )


def _guess_order(name: str, shape: Sequence[int], block_size: int | None) -> str:
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
    problem = f"could be {' or '.join(readings)}" if readings else "has an unknown form"
    raise ValueError(
        f"{title(name)}: shape {tuple(shape)} with block_size={block_size} {problem}; "
        f"set order= to one letter for each dimension (B block, N token in its block, other letters content)"
    )


def _check_order(name: str, shape: Sequence[int], order: str) -> None:
    if (
        len(order) != len(shape)
        or len(set(order)) != len(order)
        or not {"B", "N"} <= set(order)
        or "R" in order
    ):
        raise ValueError(
            f"{title(name)}: order={order!r} does not fit shape {tuple(shape)}; "
            f"expected a different letter for each dimension, with B and N and without R"
        )
