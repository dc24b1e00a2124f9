"""The copier protocol, with the checks and waits that its implementations share."""

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
    """An event on the model's stream that a copy waits for on the device. The host never waits for it."""

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
        """Record an event behind the work that the model's thread has submitted. Never waits.

        Called on the model's thread. None if the work is complete when the thread returns, as on a CPU.
        """

    async def gather(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, *, digest: bool = False
    ) -> list[bytes] | None:
        """Fill each job's payload from its rows, behind `fence`.

        Args:
            digest: Whether to compute the checksums of the payloads.

        Returns:
            xxh3_128 of each payload, 16 bytes, computed during the copy. None without `digest`, or if the
            copier has no cheaper way than a separate pass.

        Raises:
            ValueError: A row out of bounds, or a payload of wrong length or form. Nothing was copied.
        """

    async def scatter(
        self, jobs: Sequence[CopyJob], fence: Fence | None = None, progress: LoadProgress | None = None
    ) -> None:
        """Write each job's payload to its rows, behind `fence`. Two jobs must not name the same row.

        Args:
            progress: Receives the planes that are written in all rows, in order, if the copier can tell.

        Raises:
            ValueError: A row out of bounds, or a payload of wrong length or form. Nothing was copied.
        """

    def close(self) -> None:
        """Wait for running copies and free everything. A later copy raises EngineClosedError."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedJob:
    """A job whose rows are int64 and within bounds, and whose payload has the right length and form."""

    rows: BlockIds
    payload: Payload
    has_skips: bool


def check_jobs(layout: KVLayout, jobs: Sequence[CopyJob], *, writes_payload: bool) -> list[CheckedJob]:
    """Check a whole batch before any byte of it is copied.

    Raises:
        ValueError: See `Copier`.
    """
    return [_check(layout, index, job, writes_payload) for index, job in enumerate(jobs)]


async def wait_all(
    futures: Sequence[asyncio.Future[Any]], *, on_cancel: Callable[[], object] | None = None
) -> None:
    """Wait until every future has ended, even if cancelled, then raise the first error.

    For work that cannot be abandoned. A cancellation takes precedence over errors of the futures; these are
    raised in the order of the futures. Cancelled futures count as ended.

    Args:
        futures: The futures of the running work.
        on_cancel: Called on cancellation; may withdraw work that has not begun.
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
        # A reference cycle of exception and frame would keep the payloads until a garbage collection.
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
