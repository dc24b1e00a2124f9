"""Rows of a paged cache in host memory to and from payloads: by the compiled module, or else by NumPy."""

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
"""From here on rows copied one by one run at memmove's speed, so longer runs gain nothing."""

LONG_RUN_BYTES = 128 << 10
"""From here on a run is worth a call of its own from Python (half a microsecond), which gives up the lock."""

UNLOCKED_ITEMS = 512
"""NumPy assigns up to 500 items by index without giving up the interpreter lock: more are as good as free."""

MIN_ITEM_BYTES = 4 << 10
"""Items smaller than this are not copied at memmove's speed."""

BOUNCE_BYTES = 256 << 10
"""Rows at odd strides pass through a temporary of this size: it stays in the second-level cache."""


def ways() -> list[ModuleType | None]:
    """What `compiled` may be here: the module, if there is one, and None for NumPy."""
    return [None] if compiled is None else [compiled, None]


class Group(Protocol):
    """Planes `first` to `last` (exclusive), all with rows of one size, copied in the same way.

    Attributes:
        skips: Whether `copy` itself passes over rows at -1; else it must be given none.
    """

    first: int
    last: int
    row_bytes: int
    table: PlaneTable
    skips: bool

    def copy(self, where: Int64s, payload: Payload, *, to_host: bool, stream: bool) -> None:
        """Copy the rows at `where` (as the group's table gives them) to or from consecutive payload rows.

        Args:
            stream: The batch is larger than the processor's caches: pass them by, where that can be done.
        """


class Digester:
    """xxh3_128 of payloads, taken in while they are copied: a checksum of its own would read them again.

    What it can do is bounded by the compiled module, which takes in whole 64 bytes of groups of its own.
    """

    _UNIT = 64
    _MIN_BYTES = 256

    def __init__(self, module: ModuleType, groups: Sequence[CompiledGroup]) -> None:
        self._module = module
        self._groups = groups

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Digester | None:
        """None where the rows are none that the module can take in, or there is no module."""
        own = [group for group in groups if isinstance(group, CompiledGroup)]
        if compiled is None or len(own) < len(groups) or any(group.row_bytes % cls._UNIT for group in own):
            return None
        return cls(compiled, own)

    def takes(self, payload: Payload) -> bool:
        return payload.nbytes >= self._MIN_BYTES

    def gather(self, rows: BlockIds, payload: Payload, *, stream: bool) -> bytes:
        """Fill the payload from its rows, none of them skipped; the digest of it."""
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
    """Planes of one storage and row size, copied by the compiled module."""

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
    """Planes of one storage whose rows all start at multiples of the row size, but for one offset.

    Their storage is then one array of rows, and one native call moves rows of all planes.
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
            # mode="clip": the default would go through a buffer; rows are within bounds (check_jobs).
            np.take(rows, where, out=payload.view(f"V{size}"), mode="clip")
        else:
            rows[where] = payload.view(f"V{size}")


class StridedGroup:
    """Planes of one storage and row size at any strides: rows are at byte offsets."""

    skips = False

    def __init__(self, memory: Payload, planes: Sequence[Plane], first: int, last: int) -> None:
        self.first, self.last, self.row_bytes = first, last, planes[first].row_bytes
        self.table = PlaneTable(planes[first:last])
        self._memory = memory
        # A view with a row at every byte, so that a row's offset is its index.
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
    """Name the same bytes as more and smaller items, so that assigning to them gives up the lock.

    Returns:
        Indices of items, and their size in bytes: `size` divided by a power of two.
    """
    factor = 1
    while len(where) * factor < UNLOCKED_ITEMS and size % 2 == 0 and size // 2 >= MIN_ITEM_BYTES:
        size //= 2
        factor *= 2
    if factor == 1:
        return where, size
    return (where[:, None] * factor + np.arange(factor)).ravel(), size


def _copy_rows(memory: Payload, starts: Int64s, payload: Payload, size: int, *, to_host: bool) -> None:
    """Copy rows of one size, one by one."""
    places = np.arange(0, len(payload), size)
    _copy_spans(memory, starts, payload, places, np.full_like(places, size), to_host=to_host)


def _copy_spans(
    memory: Payload, starts: Int64s, payload: Payload, places: Int64s, sizes: Int64s, *, to_host: bool
) -> None:
    """Copy spans one by one: from Python, half a microsecond each, the lock free for each."""
    for start, place, size in zip(starts.tolist(), places.tolist(), sizes.tolist(), strict=True):
        if to_host:
            payload[place : place + size] = memory[start : start + size]
        else:
            memory[start : start + size] = payload[place : place + size]


def group_planes(layout: KVLayout) -> list[Group]:
    """The layout's planes in groups, as long as their order allows."""
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
    """What the planes of one group have in common; `shift` is None at odd strides."""

    storage: int
    row_bytes: int
    shift: int | None


def _plain_form(plane: Plane) -> _Form:
    return _Form(plane.storage, plane.row_bytes, None)


def _form(plane: Plane) -> _Form:
    size = plane.row_bytes
    odd = plane.block_stride % size or plane.row_stride % size
    return _Form(plane.storage, size, None if odd else plane.base % size)
