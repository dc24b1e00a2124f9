"""Copies between the rows of a paged cache in host memory and payloads.

They use the compiled module if it is installed, else NumPy.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_async.device.plan import Int64s, PlaneTable, coarsen, runs
from lmcache_async.memory.copies import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from lmcache_async.device.copier import Payload
    from lmcache_async.device.layout import KVLayout
    from lmcache_async.device.planes import Plane
    from lmcache_async.types import BlockIds

LARGE_ROW_BYTES = 32 << 10
"""Row size from which row-by-row copies reach the speed of memmove, so that longer runs are not faster."""

LONG_RUN_BYTES = 128 << 10
"""Run size that is worth a separate call from Python (half a microsecond), which releases the GIL."""

UNLOCKED_ITEMS = 512
"""Minimum items of an assignment by index: NumPy keeps the GIL for up to 500. More items cost little."""

MIN_ITEM_BYTES = 4 << 10
"""Item size below which copies are slower than memmove."""

BOUNCE_BYTES = 256 << 10
"""Size of the temporary buffer for rows at odd strides. It fits in the L2 cache."""


def ways() -> list[ModuleType | None]:
    """Return the implementations on this machine: the compiled module if installed, and None for NumPy."""
    return [None] if compiled is None else [compiled, None]


class Group(Protocol):
    """Planes with rows of one size that are copied in the same way.

    Attributes:
        first: First plane.
        last: Last plane, exclusive.
        row_bytes: Bytes of one row.
        table: Row positions of the planes, in the unit of the group.
        skips: Whether `copy` skips rows at -1. If False, `copy` must not receive such rows.
    """

    first: int
    last: int
    row_bytes: int
    table: PlaneTable
    skips: bool

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool, stream: bool) -> None:
        """Copy rows of the cache to or from consecutive rows of the payload.

        Args:
            where: Row positions from `table`; int64 of shape (num_rows,).
            payload: uint8 of shape (num_rows * row_bytes,).
            to_host: Copy to the payload; else from the payload.
            stream: The batch is larger than the CPU caches: bypass them if supported.
        """


class Digester:
    """Computes xxh3_128 of payloads during the copy, so that they are read only once.

    The compiled module requires its own groups and rows of a multiple of 64 bytes.
    """

    _UNIT = 64
    _MIN_BYTES = 256

    def __init__(self, module: ModuleType, groups: Sequence[CompiledGroup]) -> None:
        self._module = module
        self._groups = groups

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Digester | None:
        """Return a digester; None if the compiled module is missing or does not support the rows."""
        own = [group for group in groups if isinstance(group, CompiledGroup)]
        if compiled is None or len(own) < len(groups) or any(group.row_bytes % cls._UNIT for group in own):
            return None
        return cls(compiled, own)

    def takes(self, payload: Payload) -> bool:
        return payload.nbytes >= self._MIN_BYTES

    def gather(self, rows: BlockIds, payload: Payload, *, stream: bool) -> bytes:
        """Fill the payload from its rows, of which none is -1, and return its xxh3_128."""
        state = self._module.start_digest(payload.nbytes)
        start = 0
        for group in self._groups:
            where = group.table.locate(rows, 0, (group.last - group.first) * len(rows))
            stop = start + len(where) * group.row_bytes
            group.copy(where, payload[start:stop], to_host=True, stream=stream, digest=state)
            start = stop
        digest: bytes = self._module.finish_digest(state)
        return digest


class CompiledGroup:
    """Planes of one storage and one row size, copied by the compiled module."""

    skips = True

    def __init__(
        self, module: ModuleType, memory: Payload, planes: Sequence[Plane], first: int, last: int
    ) -> None:
        self.first, self.last, self.row_bytes = first, last, planes[first].row_bytes
        self.table = PlaneTable(planes[first:last])
        self._memory = memory
        self._copy = module.copy

    def copy(
        self,
        where: Int64s,
        payload: Payload,
        *,
        to_host: bool,
        stream: bool,
        digest: bytearray | None = None,
    ) -> None:
        self._copy(self._memory, where, payload, self.row_bytes, to_host, stream, digest)


class AlignedGroup:
    """Planes of one storage whose rows start at multiples of the row size plus one common offset.

    The storage is then an array of rows, and one NumPy call copies rows of all planes.
    """

    skips = False

    def __init__(self, memory: Payload, planes: Sequence[Plane], first: int, last: int) -> None:
        members = planes[first:last]
        self.first, self.last, self.row_bytes = first, last, members[0].row_bytes
        shift = members[0].base % self.row_bytes
        self.table = PlaneTable(members, origins=shift, unit=self.row_bytes)
        self._memory = memory[shift:]

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool, stream: bool) -> None:
        del stream  # NumPy cannot
        size = self.row_bytes
        memory = self._memory
        if size >= LONG_RUN_BYTES:
            _copy_rows(memory, where * size, payload, size, to_host=to_host)
            return
        if size < LARGE_ROW_BYTES:
            units, factor, offset = coarsen(where)
            if size * factor < LARGE_ROW_BYTES:
                first, lengths = runs(where)
                if len(where) * size >= LONG_RUN_BYTES * len(first):
                    starts, places, sizes = where[first] * size, first * size, lengths * size
                    _copy_spans(memory, starts, payload, places, sizes, to_host=to_host)
                    return
            where, size, memory = units, size * factor, memory[offset * size :]
        if not to_host:
            where, size = divide(where, size)
        rows = memory[: len(memory) // size * size].view(f"V{size}")
        if to_host:
            # The default mode would use a buffer; "clip" does not. Rows are within bounds (check_jobs).
            np.take(rows, where, out=payload.view(f"V{size}"), mode="clip")
        else:
            rows[where] = payload.view(f"V{size}")


class StridedGroup:
    """Planes of one storage and one row size at any strides. Rows are addressed by byte offset."""

    skips = False

    def __init__(self, memory: Payload, planes: Sequence[Plane], first: int, last: int) -> None:
        self.first, self.last, self.row_bytes = first, last, planes[first].row_bytes
        self.table = PlaneTable(planes[first:last])
        self._memory = memory
        # A view with a row at every byte: the index of a row is its offset.
        places = len(memory) - self.row_bytes + 1
        self._rows: npt.NDArray[np.void] = np.ndarray((places,), f"V{self.row_bytes}", memory, 0, (1,))

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool, stream: bool) -> None:
        del stream  # NumPy cannot
        size = self.row_bytes
        if size >= LARGE_ROW_BYTES:
            _copy_rows(self._memory, where, payload, size, to_host=to_host)
            return
        rows = payload.view(f"V{size}")
        if not to_host:
            self._rows[where] = rows
            return
        step = max(BOUNCE_BYTES // size, 1)
        for start in range(0, len(where), step):
            rows[start : start + step] = self._rows[where[start : start + step]]


def divide(where: Int64s, size: int) -> tuple[Int64s, int]:
    """Split items into smaller ones, so that NumPy releases the GIL when assigning to them.

    Args:
        where: Indices of items; int64 of shape (num_items,).
        size: Bytes of an item.

    Returns:
        Indices of the smaller items, and their size in bytes: `size` divided by a power of two.
    """
    factor = 1
    while len(where) * factor < UNLOCKED_ITEMS and size % 2 == 0 and size // 2 >= MIN_ITEM_BYTES:
        size //= 2
        factor *= 2
    if factor == 1:
        return where, size
    return (where[:, None] * factor + np.arange(factor)).ravel(), size


def _copy_rows(memory: Payload, starts: Int64s, payload: Payload, size: int, *, to_host: bool) -> None:
    places = np.arange(0, len(payload), size)
    _copy_spans(memory, starts, payload, places, np.full_like(places, size), to_host=to_host)


def _copy_spans(
    memory: Payload, starts: Int64s, payload: Payload, places: Int64s, sizes: Int64s, *, to_host: bool
) -> None:
    """Copy spans one by one. Each copy takes half a microsecond of overhead and releases the GIL."""
    for start, place, size in zip(starts.tolist(), places.tolist(), sizes.tolist(), strict=True):
        if to_host:
            payload[place : place + size] = memory[start : start + size]
        else:
            memory[start : start + size] = payload[place : place + size]


def group_planes(layout: KVLayout) -> list[Group]:
    """Group consecutive planes of a layout that are copied in the same way."""
    memories = [storage.numpy() for storage in layout.storages]
    groups: list[Group] = []
    first = 0
    for form, members in itertools.groupby(layout.planes, _form if compiled is None else _plain_form):
        last = first + len(list(members))
        memory = memories[form.storage]
        if compiled is not None:
            groups.append(CompiledGroup(compiled, memory, layout.planes, first, last))
        elif form.shift is None:
            groups.append(StridedGroup(memory, layout.planes, first, last))
        else:
            groups.append(AlignedGroup(memory, layout.planes, first, last))
        first = last
    return groups


class _Form(NamedTuple):
    """Common properties of the planes of one group; `shift` is None if a stride is no multiple of a row."""

    storage: int
    row_bytes: int
    shift: int | None


def _plain_form(plane: Plane) -> _Form:
    return _Form(plane.storage, plane.row_bytes, None)


def _form(plane: Plane) -> _Form:
    size = plane.row_bytes
    odd = plane.rows.block_stride % size or plane.rows.row_stride % size
    return _Form(plane.storage, size, None if odd else plane.base % size)
