"""Copies of rows between the paged cache and staging memory, on the device."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lmcache_async.device.copier import CheckedJob
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.plan import Piece, PlaneGroup, PlaneTable, group_planes, locate_by_group, segments
from lmcache_async.device.planes import Int64s

logger = logging.getLogger(__name__)

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""dtype of a word by its size in bytes."""


@dataclass(frozen=True, slots=True)
class Step:
    """Entries of the table that one device operation copies."""

    group: int  # of planes; 0 if the mover has no groups
    start: int
    stop: int
    place: int  # byte offset of the first row in staging


class Mover(Protocol):
    """Copies the rows of a part of a batch. All work is submitted to the current stream, without waiting."""

    columns: int
    """Numbers per entry in the table."""

    def fill(self, table: Int64s, jobs: Sequence[CheckedJob], part: Sequence[Piece]) -> list[Step]:
        """Write the positions of the rows to `table` and return the device operations of the part.

        The payload pieces are consecutive in staging.
        """

    def move(
        self, steps: Sequence[Step], table: torch.Tensor, staging: torch.Tensor, *, to_staging: bool
    ) -> None:
        """Copy from the cache to staging (uint8 of one dimension), or back. Rows at -1 are skipped."""


class TritonMover:
    """Copies all rows of a part, of all planes, by one launch of the Triton kernel."""

    def __init__(self, layout: KVLayout) -> None:
        from lmcache_async.device import kernels

        self._launch = kernels.launch
        addresses = [layout.storages[plane.storage].data_ptr() for plane in layout.planes]
        self._table = PlaneTable(layout.planes, origins=addresses)
        sizes = self._table.row_bytes
        strides = [n for plane in layout.planes for n in (plane.rows.block_stride, plane.rows.row_stride)]
        starts = [address + plane.base for address, plane in zip(addresses, layout.planes, strict=True)]
        self._alignment = math.gcd(16, *strides, *starts, *sizes.tolist())
        self._word_bytes = min(self._alignment, 8)
        self._uniform = bool((sizes == sizes[0]).all())
        self._row_words = int(sizes.max()) // self._word_bytes
        self.columns = 1 if self._uniform else 3

    def fill(self, table: Int64s, jobs: Sequence[CheckedJob], part: Sequence[Piece]) -> list[Step]:
        total = sum(piece.stop - piece.start for piece in part)
        at = 0
        for piece in part:
            job = jobs[piece.job]
            count = piece.stop - piece.start
            table[at : at + count] = self._table.locate(job, piece.start, piece.stop)
            if not self._uniform:
                planes = np.arange(piece.start, piece.stop) // len(job.rows)
                words = self._table.row_bytes[planes] // self._word_bytes
                table[2 * total + at : 2 * total + at + count] = words
            at += count
        if not self._uniform:
            words = table[2 * total : 3 * total]
            table[total : 2 * total] = np.cumsum(words) - words
        return [Step(0, 0, total, 0)]

    def move(
        self, steps: Sequence[Step], table: torch.Tensor, staging: torch.Tensor, *, to_staging: bool
    ) -> None:
        words = staging.view(WORDS[self._word_bytes])
        for step in steps:
            self._launch(
                table,
                words,
                num_entries=step.stop,
                row_words=self._row_words,
                uniform=self._uniform,
                alignment=self._alignment,
                to_staging=to_staging,
            )


class TorchMover:
    """Copies by torch index operations: one for each group of planes and each span without skipped rows."""

    columns = 1

    def __init__(self, layout: KVLayout) -> None:
        # All rows of a part are consecutive in staging, so the word must divide the rows of the other groups too.
        word = math.gcd(8, *(plane.row_bytes for plane in layout.planes))
        self._table = PlaneTable(layout.planes)
        self._groups = group_planes(layout.planes, by_storage=True)
        self._views = [_RowView(layout, group, word) for group in self._groups]

    def fill(self, table: Int64s, jobs: Sequence[CheckedJob], part: Sequence[Piece]) -> list[Step]:
        steps = []
        at, place = 0, 0
        for piece in part:
            job = jobs[piece.job]
            for index, where, offset in locate_by_group(self._table, self._groups, job, piece):
                row_bytes = self._groups[index].row_bytes
                table[at : at + len(where)] = where // self._views[index].unit  # -1 stays -1
                for low, high in segments(where):
                    steps.append(Step(index, at + low, at + high, place + offset + low * row_bytes))
                at += len(where)
            place += piece.nbytes
        return steps

    def move(
        self, steps: Sequence[Step], table: torch.Tensor, staging: torch.Tensor, *, to_staging: bool
    ) -> None:
        for step in steps:
            view, index = self._views[step.group], table[step.start : step.stop]
            staged = view.staged(staging, step)
            if to_staging:
                torch.index_select(view.rows, 0, index, out=staged)
            else:
                view.rows.index_copy_(0, index, staged)


class _RowView:
    """View of a storage with a row of a group at every multiple of `unit` bytes."""

    def __init__(self, layout: KVLayout, group: PlaneGroup, word: int) -> None:
        planes = layout.planes[group.first : group.last]
        memory = layout.storages[planes[0].storage]
        strides = [stride for plane in planes for stride in (plane.rows.block_stride, plane.rows.row_stride)]
        self.row_bytes = group.row_bytes
        self.unit = math.gcd(self.row_bytes, *strides, *(plane.base for plane in planes))
        word = math.gcd(word, self.unit)
        words = memory[: len(memory) // word * word].view(WORDS[word])
        count = (len(memory) - self.row_bytes) // self.unit + 1
        self.rows = words.as_strided((count, self.row_bytes // word), (self.unit // word, 1))

    def staged(self, staging: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the rows of `step` in staging, as words."""
        count = step.stop - step.start
        span = staging[step.place : step.place + count * self.row_bytes]
        return span.view(self.rows.dtype).view(count, -1)


def open_mover(layout: KVLayout) -> Mover:
    """Return a mover with the Triton kernel if it compiles, else one with torch operations."""
    device = layout.device
    try:
        mover = TritonMover(layout)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            _try(mover, layout)
    except Exception as error:  # noqa: BLE001  any failure of Triton, its compiler or the driver
        logger.warning("the Triton kernel is not available, copying with torch's index operations: %s", error)
        return TorchMover(layout)
    return mover


def _try(mover: TritonMover, layout: KVLayout) -> None:
    """Compile both kernels now, because later launches run on the thread of the loop. No row is accessed."""
    table = torch.full((3,), -1, dtype=torch.int64, device=layout.device)
    staging = torch.empty(16, dtype=torch.uint8, device=layout.device)
    step = Step(0, 0, 1, 0)
    for to_staging in (True, False):
        mover.move([step], table, staging, to_staging=to_staging)
