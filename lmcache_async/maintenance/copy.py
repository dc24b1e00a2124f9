"""Copies of records from one store to others. Each record is verified on the way."""

from __future__ import annotations

import functools
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeAlias

from lmcache_async.errors import ChunkCorruptError, TierError, TierFullError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Progress, for_each, no_progress
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import ERROR, GONE, PASSED_OVER, RecordInfo, check, examine
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.tiers.offline import OfflineStore, StoredRecord

VERIFY_THREADS = 2
_STEP_NS = 1000  # between the times of use assigned to records whose source has none; as in the disk tier

VerifyRecord: TypeAlias = Callable[[StoredRecord, Iterator[memoryview]], RecordInfo]
"""Verifies a record that is read in pieces, in a worker thread."""


@dataclass(kw_only=True)
class CopyCounts:
    """Counts of the records of a copy that a destination lacked, by outcome."""

    source: str
    bytes: int = 0  # written; a record written to two destinations counts once
    encrypted: int = 0  # copied without decryption
    refused: Counter[str] = field(default_factory=Counter)  # by cause
    refused_records: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0
    passed_over: int = 0
    skipped: int = 0  # `max_bytes` was reached, or a destination was full


@dataclass(kw_only=True)
class CopyReport(CopyCounts):
    """Result of `copy`."""

    destination: str
    held_by_process: str | None
    dry_run: bool
    complete: bool = False  # the destination has every selected record
    records: int = 0  # copied; of a dry run, to be copied
    there: int = 0


async def copy(
    source: OfflineStore,
    destination: OfflineStore,
    progress: Progress = no_progress,
    *,
    selection: Selection = EVERYTHING,
    max_bytes: int | None = None,
    max_bytes_per_s: int | None = None,
    dry_run: bool = False,
) -> CopyReport:
    """Copy the records that the destination lacks, the most recently used first.

    A prefix is copied before its continuations. If the call is cancelled or the process is killed, the copied
    records stay, and the next call copies the rest.

    A dry run verifies no payloads.
    """
    name = destination.name
    report = CopyReport(
        source=source.name, destination=name, held_by_process=source.holder or None, dry_run=dry_run
    )
    records = await source.list()
    newest_first = sorted(records, key=lambda one: one.use_order, reverse=True)
    copier = RecordCopier(
        source=source,
        counts=report,
        verify=functools.partial(check, selection=selection),
        selection=selection,
        max_bytes=max_bytes,
        max_bytes_per_s=max_bytes_per_s,
        dry_run=dry_run,
    )
    await copier.run(newest_first, [destination], progress)
    report.there = copier.there[name]
    left = report.skipped + report.gone + report.passed_over + report.refused.total()
    report.records = len(records) - report.there - left
    report.complete = not (dry_run or report.refused or report.skipped)
    return report


@dataclass(kw_only=True, slots=True, eq=False)
class RecordCopier:
    """Copies records to the destinations that lack them, each after its verification.

    Once `max_bytes` is reached or a destination is full, the remaining records are skipped without being read.
    """

    source: OfflineStore
    counts: CopyCounts
    verify: VerifyRecord
    selection: Selection = EVERYTHING
    max_bytes: int | None = None
    max_bytes_per_s: int | None = None
    dry_run: bool = False
    copied: Counter[str] = field(default_factory=Counter)
    there: Counter[str] = field(default_factory=Counter)
    _ended: bool = False

    async def run(
        self, records: Sequence[StoredRecord], destinations: Sequence[OfflineStore], progress: Progress
    ) -> None:
        """Copy the records in this order; the first ones should be the most useful.

        If cancelled, each destination has the whole of a record or no part of it.
        """
        lacking: list[list[OfflineStore]] = [[] for _ in records]
        for destination in destinations:
            if not self.dry_run:
                await destination.prepare_writes()
            has = await destination.has([one.key for one in records])
            self.there[destination.name] = sum(has)
            for part, there in zip(lacking, has, strict=True):
                part += [] if there else [destination]
        now = time.time_ns()
        wanted = [
            (one._replace(used_ns=one.used_ns or now - number * _STEP_NS), part)
            for number, (one, part) in enumerate(zip(records, lacking, strict=True))
            if part
        ]
        with WorkerPool(VERIFY_THREADS, thread_name_prefix="lmcache-verify") as workers:

            async def work(item: tuple[StoredRecord, Sequence[OfflineStore]]) -> int:
                return await self._copy(*item, workers)

            try:
                await for_each(
                    "records",
                    wanted,
                    work,
                    progress,
                    in_flight=self.source.in_flight,
                    max_bytes_per_s=self.max_bytes_per_s,
                )
            finally:
                if not self.dry_run:
                    for destination in destinations:
                        await destination.sync()

    async def _copy(
        self, stored: StoredRecord, destinations: Sequence[OfflineStore], workers: Executor
    ) -> int:
        """Copy one record. Return the bytes read, not counting a header that was read separately."""
        counts, nbytes = self.counts, stored.nbytes
        if self._ended:
            counts.skipped += 1
            return 0
        wants_size = self.dry_run and (self.source.reads_headers or self.max_bytes is not None)
        if (self.selection.patterns or wants_size) and (self.source.reads_headers or self.dry_run):
            info = await examine(self.source, stored, self.selection, header_only=True)
            if info.cause:
                self._leave(info)
                return 0
            nbytes = info.record_bytes  # a file may be longer
        if self.dry_run:
            self._reserve(nbytes)
            return 0
        try:
            buffer = await self.source.load(stored)
        except TierUnavailableError:
            raise
        except TierError as error:
            self._leave(RecordInfo(stored, cause=ERROR, message=str(error)))
            return 0
        if buffer is None:
            counts.gone += 1
            return 0
        with buffer:
            info = await in_thread(workers, functools.partial(self.verify, stored, iter([buffer.view])))
            nbytes = info.record_bytes or buffer.nbytes
            if info.cause:
                self._leave(info)
            elif self._reserve(nbytes):  # before the next await: other records are being copied
                buffer.resize(nbytes)  # without the padding
                written = [
                    await self._write(destination, stored, buffer, workers) for destination in destinations
                ]
                if any(written):
                    counts.encrypted += bool(info.key_id)
                else:
                    counts.bytes -= nbytes
        return nbytes

    def _reserve(self, nbytes: int) -> bool:
        """Count the bytes of a record to copy. Return False if the record is skipped instead."""
        counts = self.counts
        if self.max_bytes is not None and counts.bytes + nbytes > self.max_bytes:
            self._ended = True
        if self._ended:
            counts.skipped += 1
            return False
        counts.bytes += nbytes
        return True

    def _leave(self, info: RecordInfo) -> None:
        """Count a record that is not copied."""
        counts = self.counts
        if info.cause == GONE:
            counts.gone += 1
        elif info.cause == PASSED_OVER:
            counts.passed_over += 1
        else:
            counts.refused[info.cause] += 1
            info.list_in(counts.refused_records)

    async def _write(
        self, destination: OfflineStore, stored: StoredRecord, record: Buffer, workers: Executor
    ) -> bool:
        buffer = await destination.allocate(record.nbytes)
        if buffer is None:
            message = f"it has {record.nbytes} bytes, more than --max-record-bytes allows"
            self._leave(RecordInfo(stored, cause="too_long", message=message))
            return False
        with buffer:
            # A tier can write only from the arena that is bound to it.
            await in_thread(
                workers, functools.partial(operator.setitem, buffer.view, slice(None), record.view)
            )
            try:
                await destination.write(stored.key, buffer, stored.used_ns)
            except TierUnavailableError:
                raise
            except TierError as error:
                cause = error.cause if isinstance(error, ChunkCorruptError) else "error"
                if isinstance(error, TierFullError):
                    self._ended, cause = True, "full"
                self._leave(RecordInfo(stored, cause=cause, message=str(error)))
                return False
        self.copied[destination.name] += 1
        return True
