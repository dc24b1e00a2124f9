"""Copier protocol, and the checks that its implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.device.layout import KVLayout
from lmcache_async.device.progress import LoadProgress
from lmcache_async.types import BlockIds

Payload: TypeAlias = npt.NDArray[np.uint8]
"""Payload of a chunk, `[plane][row]`: contiguous uint8 of shape (layout.payload_bytes(num_rows),)."""


class DeviceEvent(Protocol):
    """Event in a stream of a device."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached the event. Raises the error of the device."""


Fence: TypeAlias = object
"""Result of `Copier.fence`: an event on the model's stream after which a copy starts. The model's thread never waits for it."""


class CopyJob(NamedTuple):
    """Rows and payload of one chunk.

    Attributes:
        rows: Rows of the paged cache, in the order of the chunk; int64 of shape (num_rows,). A row of -1 is
            skipped: its payload bytes are neither read nor written.
        payload: uint8 array or memoryview of `layout.payload_bytes(num_rows)` bytes. The caller keeps it
            valid until the copy has ended.
    """

    rows: BlockIds
    payload: Payload | memoryview


class Copier(Protocol):
    """Copies between one paged cache and host memory.

    `gather` and `scatter` are awaited on an event loop; calls may overlap. A job is checked before any byte
    of it is copied. A cancelled call waits until the started copies have ended, then raises CancelledError. After
    that, and after an error, neither device nor host memory is accessed, and it is unknown which rows were copied.
    """

    @property
    def layout(self) -> KVLayout: ...

    def fence(self) -> Fence | None:
        """Record an event after the work that the model thread has submitted, without waiting.

        Called on the model thread.

        Returns:
            The fence; None if submitted work is complete when the submitting call returns, as on a CPU.
        """

    async def wait_fence(self, fence: Fence) -> None:
        """Wait until the device has reached `fence`, without blocking a thread of the caller.

        If the call is cancelled, the fence can still be used. Raises the error of the device.
        """

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        """Fill the payload of each job from its rows, after `fence`.

        Args:
            digest: Whether to compute the checksums of the payloads.

        Returns:
            xxh3_128 of each payload, 16 bytes, computed during the copy. None without `digest`, or if the
            copier cannot compute it more cheaply than a separate pass.

        Raises:
            LMCacheAsyncError: The copier is closed, or no thread can be started for the copy.
            ValueError: A row is out of bounds, or a payload has the wrong length or form.
        """

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        """Write the payload of each job to its rows, after `fence`. Two jobs must not contain the same row.

        Args:
            progress: Receives the number of leading planes that are written in all rows, if the copier
                supports it.

        Raises:
            LMCacheAsyncError: The copier is closed, or no thread can be started for the copy.
            ValueError: A row is out of bounds, or a payload has the wrong length or form.
        """

    def close(self) -> None:
        """Wait for running copies and free all resources. A later copy raises EngineClosedError."""


class CheckedJob(NamedTuple):
    """Job with int64 rows within bounds, -1 only if `has_skips`, and a payload of the right length and form."""

    rows: BlockIds
    payload: Payload
    has_skips: bool


def check_jobs(
    layout: KVLayout, jobs: Sequence[CopyJob], *, writes_payload: bool, first: int = 0
) -> list[CheckedJob]:
    """Check jobs before any byte of them is copied. Raises ValueError; see `Copier`.

    Args:
        layout: Layout of the cache.
        jobs: Jobs of a batch.
        writes_payload: Whether payloads are written, and not read.
        first: Number of the first one in the batch.
    """
    rows = [_row_ids(index, job) for index, job in enumerate(jobs, first)]
    # The bounds of all jobs together: for the few rows of one chunk, the overhead of NumPy's calls would dominate.
    every = np.concatenate(rows) if rows else np.empty(0, np.int64)
    low, high = (int(every.min()), int(every.max())) if every.size else (0, -1)
    if low < -1 or high >= layout.num_rows:
        _refuse_rows(layout, rows, first)
    skips = [low < 0 and bool((ids < 0).any()) for ids in rows]
    payloads = [
        _payload(layout, index, job, len(ids), writes_payload)
        for index, (job, ids) in enumerate(zip(jobs, rows, strict=True), first)
    ]
    return list(map(CheckedJob, rows, payloads, skips))


_INT64, _UINT8 = np.dtype(np.int64), np.dtype(np.uint8)


def _row_ids(index: int, job: CopyJob) -> BlockIds:
    rows = np.asarray(job.rows)
    if rows.dtype is _INT64 and rows.ndim == 1 and rows.flags.c_contiguous:
        return rows
    fits = rows.dtype.kind in "iu" and np.can_cast(rows.dtype, np.int64)  # 2**64 - 1 would become -1
    if rows.ndim != 1 or (rows.size and not fits):
        raise ValueError(
            f"job {index}: rows must be int64 of shape (num_rows,), not {rows.dtype} {rows.shape}"
        )
    return np.ascontiguousarray(rows, np.int64)


def _refuse_rows(layout: KVLayout, rows: Sequence[BlockIds], first: int) -> None:
    for index, ids in enumerate(rows, first):
        bad = ids[(ids < -1) | (ids >= layout.num_rows)]
        if bad.size:
            raise ValueError(
                f"job {index}: row {bad[0]} is out of bounds; the cache has rows 0 to {layout.num_rows - 1}"
            )


def _payload(layout: KVLayout, index: int, job: CopyJob, num_rows: int, writes_payload: bool) -> Payload:
    payload = np.asarray(job.payload)
    expected = layout.payload_bytes(num_rows)
    flags = payload.flags
    if payload.dtype != _UINT8 or payload.shape != (expected,) or not flags.c_contiguous:
        raise ValueError(
            f"job {index}: {num_rows} rows need a contiguous uint8 payload of shape ({expected},), "
            f"not {payload.dtype} {payload.shape}"
        )
    if writes_payload and not flags.writeable:
        raise ValueError(f"job {index}: the payload is read-only")
    return payload
