"""Copies between the rows of a paged cache in host memory and payloads.

They use the compiled module if it is installed, else NumPy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmcache_async.device.layout import KVLayout
from lmcache_async.device.plan import segments
from lmcache_async.memory.buffer import Bytes
from lmcache_async.memory.copies import STREAM_PAGES, RowCopy, compiled

LARGE_ROW_BYTES = 32 << 10
"""Row size from which row-by-row copies by NumPy reach the speed of memmove. Each one takes half a microsecond
of overhead and releases the GIL.
"""

LONG_RUN_BYTES = 128 << 10
"""Average size of runs of consecutive rows from which NumPy copies each run by one call."""

STEP_BYTES = 256 << 10
"""Bytes of one call of NumPy that keeps the GIL and uses a temporary array, which fits in the L2 cache."""

DIGEST_UNIT = 64
"""The row size must be a multiple of this number of bytes for a checksum during the copy."""

MIN_DIGEST_BYTES = 256
"""Minimum bytes of a payload for a checksum during the copy."""


class _AddressRange:
    """Addresses from the first to the last byte of the storages of a layout, as an array interface of NumPy."""

    def __init__(self, layout: KVLayout) -> None:
        self.storages = layout.storages  # keeps the memory alive as long as the array
        self.start = min(storage.data_ptr() for storage in self.storages)
        nbytes = max(storage.data_ptr() + storage.nbytes for storage in self.storages) - self.start
        self.__array_interface__ = {
            "data": (self.start, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def cache_memory(layout: KVLayout) -> tuple[Bytes, list[int]]:
    """Return an array with the memory of all storages, and for each plane the position of its storage in the array.

    The rows of all planes are then addressed by one number. Memory between the storages must not be accessed.

    Raises:
        ValueError: A row is not within its storage.
    """
    addresses = _AddressRange(layout)
    for plane in layout.planes:
        nbytes = layout.storages[plane.storage].nbytes
        end = plane.start(layout.num_rows - 1) + plane.row_bytes
        if plane.base < 0 or end > nbytes:
            raise ValueError(
                f"rows at offset {plane.base} end at {end}, beyond the {nbytes} bytes of their storage"
            )
    origins = [layout.storages[plane.storage].data_ptr() - addresses.start for plane in layout.planes]
    return np.asarray(addresses), origins


def can_digest(layout: KVLayout) -> bool:
    """Return whether `copy_rows` can compute checksums for the rows of a layout."""
    return compiled is not None and not any(plane.row_bytes % DIGEST_UNIT for plane in layout.planes)


def copy_rows(copies: list[RowCopy], *, to_payload: bool, stream: bool, digest: bool = False) -> bytes | None:
    """Copy rows of the cache to or from payloads.

    The compiled module makes all copies in one call, because a thread that returns to Python has to wait for the GIL.

    Args:
        stream: The batch is larger than the CPU caches: bypass them if supported.
        digest: Whether to return the xxh3_128 of the payloads, which are then read only once. See `can_digest`; no
            row may be skipped.
    """
    if compiled is not None:
        result: bytes | None = compiled.copy(copies, to_payload, stream and STREAM_PAGES, digest)
        return result
    for copy in copies:
        _copy_by_numpy(*copy, to_payload=to_payload)
    return None


def _copy_by_numpy(
    memory: Bytes, starts: npt.NDArray[np.int64], payload: Bytes, row_bytes: int, *, to_payload: bool
) -> None:
    for first, last in segments(starts):
        offsets, part = starts[first:last], payload[first * row_bytes : last * row_bytes]
        edges = np.concatenate(([0], np.flatnonzero(np.diff(offsets) != row_bytes) + 1, [last - first]))
        if row_bytes >= LARGE_ROW_BYTES or len(part) >= LONG_RUN_BYTES * (len(edges) - 1):
            # One call for each run of consecutive rows.
            places, starts_of_runs = (edges * row_bytes).tolist(), offsets[edges[:-1]].tolist()
            for start, low, high in zip(starts_of_runs, places, places[1:], strict=False):
                run = memory[start : start + high - low]
                np.copyto(*((part[low:high], run) if to_payload else (run, part[low:high])))
            continue
        rows = part.view(f"V{row_bytes}")
        # A view with a row at every byte: the index of a row is its offset.
        shape = (len(memory) - row_bytes + 1,)
        rows_by_offset: npt.NDArray[np.void] = np.ndarray(shape, rows.dtype, memory, 0, (1,))
        step = max(STEP_BYTES // row_bytes, 1)
        for low in range(0, len(rows), step):
            batch = slice(low, low + step)
            if to_payload:
                rows[batch] = rows_by_offset[offsets[batch]]
            else:
                rows_by_offset[offsets[batch]] = rows[batch]
