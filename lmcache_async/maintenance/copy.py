"""Copies of records from one store to others. Each record is verified on the way."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from lmcache_async.errors import ChunkCorruptError, TierError, TierFullError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Meter, RateLimit, map_in_order
from lmcache_async.maintenance.namespaces import EVERYTHING, Selection
from lmcache_async.maintenance.record import RecordInfo, check, info_of, read_headers
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.tiers.offline import OfflineStore, StoredRecord
from lmcache_async.types import ChunkKey

MAX_LISTED = 100
"""Records that a report lists with their cause."""
VERIFY_THREADS = 2
_STEP_NS = 1000  # between the times of use assigned to records whose source has none; as in the disk tier

Check = Callable[[StoredRecord, Iterator[memoryview]], RecordInfo]
"""Verifies a record that is read in pieces, in a worker thread."""


@dataclass(slots=True)
class CopyCounts:
    """Counts of the records of a copy, by outcome.

    Attributes:
        copied: Records written, by the name of their destination.
        bytes: Bytes of the records written; a record written to two destinations counts once.
        encrypted: Records written that are encrypted. They are copied as they are.
        refused: Records not written, by cause: a cause of `ChunkCorruptError`, `too_long`, `full` or `error`.
        listed: The first `MAX_LISTED` of those refused, each with its key, cause and message.
        gone: Records that were deleted from the source in the meantime.
        passed_over: Records of namespaces that are not selected.
        skipped: Records left out because `max_bytes` was reached or a destination was full.
    """

    copied: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    encrypted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    listed: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0
    passed_over: int = 0
    skipped: int = 0

    def refuse(self, key: ChunkKey, cause: str, message: str) -> None:
        self.refused[cause] += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append({"key": key.hex(), "cause": cause, "message": message})

    def as_dict(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "encrypted": self.encrypted,
            "refused": dict(sorted(self.refused.items())),
            "refused_records": list(self.listed),
            "gone": self.gone,
            "passed_over": self.passed_over,
            "skipped": self.skipped,
        }


class Copier:
    """Copies records, each after its verification. Records may be copied at the same time.

    Once `max_bytes` is reached or a destination is full, the remaining records are skipped without being
    read. Callers copy the most useful records first.

    Args:
        source: Store that is read.
        workers: Threads that verify and copy bytes.
        counts: Updated with the outcome of each record.
        selection: Namespaces to copy. Records of others are passed over.
        max_bytes: Maximum bytes to copy.
    """

    def __init__(
        self,
        source: OfflineStore,
        workers: Executor,
        counts: CopyCounts,
        *,
        selection: Selection = EVERYTHING,
        max_bytes: int | None = None,
    ) -> None:
        self._source = source
        self._workers = workers
        self._counts = counts
        self._selection = selection
        self._max_bytes = max_bytes
        self._ended = False

    async def copy(self, stored: StoredRecord, destinations: Sequence[OfflineStore], verify: Check) -> int:
        """Copy one record to each of the destinations.

        If cancelled, each destination has the whole record or no part of it.

        Returns:
            Its length in bytes; 0 if it was not copied.

        Raises:
            TierUnavailableError: The source or a destination does not answer.
        """
        counts = self._counts
        if self._ended:
            counts.skipped += 1
            return 0
        try:
            if self._selection.patterns and self._source.reads_headers:
                info = await info_of(self._source, stored)
                if info is not None and not self._selection.takes(info.namespace):
                    counts.passed_over += 1
                    return 0
            buffer = await self._source.load(stored)
        except TierUnavailableError:
            raise
        except TierError as error:
            counts.refuse(stored.key, "error", str(error))
            return 0
        if buffer is None:
            counts.gone += 1
            return 0
        with buffer:
            found = await in_thread(self._workers, functools.partial(_verify, verify, stored, buffer.view))
            if not found.selected:
                counts.passed_over += 1
                return 0
            if found.cause:
                counts.refuse(stored.key, found.cause, found.message)
                return 0
            nbytes = found.record_bytes
            if not self._has_room(nbytes):
                counts.skipped += 1
                return 0
            counts.bytes += nbytes  # before the next await: other records are being copied
            buffer.resize(nbytes)  # without the padding
            written = [await self._write(destination, stored, buffer) for destination in destinations]
        if not any(written):
            counts.bytes -= nbytes
            return 0
        counts.encrypted += bool(found.key_id)
        return nbytes

    def _has_room(self, nbytes: int) -> bool:
        if self._max_bytes is not None and self._counts.bytes + nbytes > self._max_bytes:
            self._ended = True
        return not self._ended

    async def _write(self, destination: OfflineStore, stored: StoredRecord, record: Buffer) -> bool:
        buffer = await destination.allocate(record.nbytes)
        if buffer is None:
            message = f"it has {record.nbytes} bytes, more than --max-record-bytes allows"
            self._counts.refuse(stored.key, "too_long", message)
            return False
        with buffer:
            # A tier writes from memory that was bound to it.
            await in_thread(self._workers, functools.partial(_fill, buffer.view, record.view))
            try:
                await destination.write(stored.key, buffer, stored.used_ns)
            except TierUnavailableError:
                raise
            except TierFullError as error:
                self._ended = True
                self._counts.refuse(stored.key, "full", str(error))
            except TierError as error:
                cause = error.cause if isinstance(error, ChunkCorruptError) else "error"
                self._counts.refuse(stored.key, cause, str(error))
            else:
                self._counts.copied[destination.name] += 1
                return True
        return False


@dataclass(slots=True)
class CopyReport:
    """Result of `copy`, or of `plan_copy`.

    Attributes:
        source: Name of the source.
        destination: Name of the destination.
        holder: The process that has the source open; "" if none is known.
        there: Records that the destination had already.
        records: Records written; of a dry run, records to write.
        counts: Counts of the records that the destination lacked, by outcome.
        dry_run: Nothing was written.
        complete: Whether the destination has every selected record of the source.
    """

    source: str
    destination: str
    holder: str = ""
    there: int = 0
    records: int = 0
    counts: CopyCounts = field(default_factory=CopyCounts)
    dry_run: bool = False
    complete: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "destination": self.destination,
            "held_by_process": self.holder or None,
            "dry_run": self.dry_run,
            "complete": self.complete,
            "records": self.records,
            "there": self.there,
            **self.counts.as_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of a copy.

    Attributes:
        selection: Namespaces to copy.
        max_bytes: Maximum bytes to copy.
        max_bytes_per_s: Maximum bytes read per second.
    """

    selection: Selection = EVERYTHING
    max_bytes: int | None = None
    max_bytes_per_s: int | None = None


async def copy(
    source: OfflineStore, destination: OfflineStore, options: CopyOptions, meter: Meter
) -> CopyReport:
    """Copy the records that the destination lacks, the most recently used first.

    A prefix is copied before its continuations. If the call is cancelled or the process is killed, the copied
    records stay, and the next call copies the rest.

    Raises:
        ConfigError: The source cannot list its records, or the destination cannot be written to.
        TierUnavailableError: The source or the destination does not answer.
    """
    report = CopyReport(source.name, destination.name, source.holder)
    records = await source.list()
    await destination.prepare_writes()
    missing = await _missing(records, destination, report)
    meter.begin("records", records=len(missing), nbytes=sum(one.nbytes for one in missing) or None)
    verify = functools.partial(check, selection=options.selection)
    rate = RateLimit(options.max_bytes_per_s)
    with contextlib.ExitStack() as undo:
        workers = WorkerPool(VERIFY_THREADS, thread_name_prefix="lmcache-verify")
        undo.callback(workers.shutdown)
        copier = Copier(
            source, workers, report.counts, selection=options.selection, max_bytes=options.max_bytes
        )

        async def work(one: StoredRecord) -> int:
            return await copier.copy(one, [destination], verify)

        try:
            async with contextlib.aclosing(
                map_in_order(missing, work, in_flight=source.in_flight)
            ) as results:
                async for nbytes in results:
                    meter.advance(1, nbytes)
                    await rate.wait(nbytes)
        finally:
            await destination.sync()
    report.records = report.counts.copied[destination.name]
    report.complete = not report.counts.refused and not report.counts.skipped
    return report


async def plan_copy(
    source: OfflineStore,
    destination: OfflineStore | None,
    options: CopyOptions,
    meter: Meter,
    *,
    name: str = "",
) -> CopyReport:
    """Report what `copy` would copy. Nothing is changed, and payloads are not verified.

    Args:
        destination: None if it does not exist yet.
        name: Name of a destination that does not exist yet.
    """
    report = CopyReport(source.name, name if destination is None else destination.name, source.holder)
    report.dry_run = True
    counts = report.counts
    missing = await _missing(await source.list(), destination, report)
    if not options.selection.patterns:
        for one in missing:
            _plan_one(report, one.nbytes, options.max_bytes)
        return report
    async with contextlib.aclosing(read_headers(source, missing, meter)) as headers:
        async for info in headers:
            if info is None:
                counts.gone += 1
            elif isinstance(info, TierError):
                counts.refused["error"] += 1
            elif not options.selection.takes(info.namespace):
                counts.passed_over += 1
            else:
                _plan_one(report, info.stored.nbytes or info.record_bytes, options.max_bytes)
    return report


def _plan_one(report: CopyReport, nbytes: int, max_bytes: int | None) -> None:
    counts = report.counts
    if counts.skipped or (max_bytes is not None and counts.bytes + nbytes > max_bytes):
        counts.skipped += 1
    else:
        report.records += 1
        counts.bytes += nbytes


async def _missing(
    records: Sequence[StoredRecord], destination: OfflineStore | None, report: CopyReport
) -> list[StoredRecord]:
    """Return the records that the destination lacks, the most recently used first."""
    newest_first = sorted(records, key=lambda one: one.use_order, reverse=True)
    if destination is None:
        return newest_first
    now = time.time_ns()
    missing = []
    for number, (one, there) in enumerate(
        zip(newest_first, await destination.has([one.key for one in newest_first]), strict=True)
    ):
        if there:
            report.there += 1
        else:
            missing.append(one._replace(used_ns=one.used_ns or now - number * _STEP_NS))
    return missing


def _verify(verify: Check, stored: StoredRecord, view: memoryview) -> RecordInfo:
    return verify(stored, iter([view]))


def _fill(view: memoryview, record: memoryview) -> None:
    view[:] = record
