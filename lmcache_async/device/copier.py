"""What copies between the paged KV cache and payloads in host memory, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.device.stream import DeviceEvent
from lmcache_async.types import BlockIds

if TYPE_CHECKING:
    from lmcache_async.device.layout import KVLayout
    from lmcache_async.device.progress import LoadProgress

Payload: TypeAlias = npt.NDArray[np.uint8]
"""A chunk's payload `[plane][row]`: contiguous uint8 of shape (layout.payload_bytes(num_rows),)."""


@dataclass(frozen=True, slots=True)
class Fence:
    """What a copy must wait for on the device: an event on the model's stream.

    The host never waits for it.
    """

    event: DeviceEvent


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """The rows of one chunk and its payload.

    Attributes:
        rows: Rows of the paged cache, in the chunk's order; int64 of shape (num_rows,). A row of -1 is
            skipped: its bytes of the payload are neither read nor written.
        payload: Its payload, an array or a memoryview; the caller keeps it valid until the copy has ended.
    """

    rows: BlockIds
    payload: Payload | memoryview


class Copier(Protocol):
    """Copies between one paged cache and host memory.

    `gather` and `scatter` are awaited on an event loop; calls may overlap. A batch is checked as a whole
    before any byte moves. Cancelled, a call still waits for the real end of what was started, so that
    afterwards neither device nor host memory is touched any more, and then raises CancelledError; which
    rows were copied is then unknown.
    """

    @property
    def layout(self) -> KVLayout: ...

    def fence(self) -> Fence | None:
        """What the model's thread has asked of the device so far; called on that thread, never waits.

        None where the model's work is done by the time its thread returns.
        """

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        """Fill each job's payload from its rows, behind `fence`.

        Args:
            digest: Whether the payloads' checksums are wanted.

        Returns:
            xxh3_128 of each payload as it was copied, 16 bytes. None when it was not asked for, or would
            cost the copier as much as anyone else.

        Raises:
            ValueError: A row out of bounds, or a payload of wrong length or form. Nothing was copied.
        """

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        """Write each job's payload to its rows, behind `fence`. Two jobs must not name the same row.

        Args:
            progress: Told of planes that are written in all rows, where the copier knows; first planes first.

        Raises:
            ValueError: A row out of bounds, or a payload of wrong length or form. Nothing was copied.
        """

    def close(self) -> None:
        """Wait for running copies and give everything back. A later copy raises EngineClosedError."""


def open_copier(
    layout: KVLayout,
    *,
    threads: int = 2,
    staging_bytes: int = 64 << 20,
    store_priority: int = 0,
    load_priority: int = 0,
) -> Copier:
    """The copier for the device that the layout's tensors lie on.

    Args:
        threads: Copying threads, for a cache in host memory.
        staging_bytes: Device memory for each direction, for a cache on a GPU.
        store_priority: Of the side streams of stores, for a cache on a GPU: 0 is the lowest, -1 above it.
        load_priority: The same of loads.

    Raises:
        ValueError: No copier for this kind of device.
    """
    if layout.device.type == "cpu":
        from lmcache_async.device.cpu import CpuCopier

        return CpuCopier(layout, threads=threads)
    if layout.device.type == "cuda":
        from lmcache_async.device.cuda import CudaCopier

        return CudaCopier(
            layout, staging_bytes=staging_bytes, store_priority=store_priority, load_priority=load_priority
        )
    raise ValueError(f"no copier for a KV cache on {layout.device}; it must lie on a CPU or a CUDA device")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedJob:
    """A job whose rows are int64 and within bounds, and whose payload has the right length and form."""

    rows: BlockIds
    payload: Payload
    has_skips: bool


def check_jobs(layout: KVLayout, jobs: Sequence[CopyJob], *, writes_payload: bool) -> list[CheckedJob]:
    """Check a whole batch, before any byte of it moves.

    Raises:
        ValueError: See `Copier`.
    """
    return [_check(layout, index, job, writes_payload) for index, job in enumerate(jobs)]


async def wait_all(
    futures: Sequence[asyncio.Future[Any]], *, on_cancel: Callable[[], object] | None = None
) -> None:
    """Wait until every future has ended, also when cancelled; then raise what came first.

    For work that cannot be abandoned; `on_cancel` may withdraw what has not begun. A cancellation outranks
    the futures' own errors, these are raised in the futures' order. Cancelled futures count as ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
            if on_cancel is not None:
                on_cancel()
    failures = [failure for f in futures if not f.cancelled() and (failure := f.exception()) is not None]
    try:
        if cancelled is not None:
            raise cancelled
        if failures:
            raise failures[0]
    finally:
        # An exception that knows this frame, known by it, would keep the payloads until a garbage collection.
        cancelled = None
        failures.clear()


def _check(layout: KVLayout, index: int, job: CopyJob, writes_payload: bool) -> CheckedJob:
    rows = np.asarray(job.rows)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
        raise ValueError(
            f"job {index}: rows must be integers of shape (num_rows,), not {rows.dtype} {rows.shape}"
        )
    rows = np.ascontiguousarray(rows, np.int64)
    low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, -1)
    if low < -1 or high >= layout.num_rows:
        bad = low if low < -1 else high
        raise ValueError(
            f"job {index}: row {bad} is out of bounds; the cache has rows 0 to {layout.num_rows - 1}"
        )
    payload = np.asarray(job.payload)
    expected = layout.payload_bytes(len(rows))
    if payload.dtype != np.uint8 or payload.shape != (expected,) or not payload.flags.c_contiguous:
        raise ValueError(
            f"job {index}: {len(rows)} rows need a contiguous uint8 payload of shape ({expected},), "
            f"not {payload.dtype} {payload.shape}"
        )
    if writes_payload and not payload.flags.writeable:
        raise ValueError(f"job {index}: the payload is read-only")
    return CheckedJob(rows, payload, low < 0)
