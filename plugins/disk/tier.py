"""The disk tier: chunks as files of a directory that one process owns."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import mmap
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import aiofiles.os

from lmcache_async.errors import (
    BudgetExceededError,
    ChunkCorruptError,
    TierClosedError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.logging import LimitedLogger
from lmcache_async.memory.buffer import PAGE, Buffer
from lmcache_async.memory.header import MAX_RECORD_BYTES
from lmcache_async.memory.record import PIECE_BYTES
from lmcache_async.memory.threads import run_shielded, wait_done, wait_ended
from lmcache_async.plugins.disk.config import DiskConfig
from lmcache_async.plugins.disk.directory import NO_SPACE, RecordDirectory, detect_direct
from lmcache_async.plugins.disk.files import (
    DiskThreads,
    Failure,
    RecordFiles,
    RecordReads,
    WriteBatch,
    not_started,
    too_long,
)
from lmcache_async.plugins.disk.index import DiskIndex, Entry, KeyLocks, Reservation
from lmcache_async.plugins.disk.offline import DiskRecords
from lmcache_async.tiers.base import Allocate, Capabilities, Medium, ScrubReport, TierStatistics
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.diagnosis import Check
from lmcache_async.tiers.offline import OfflineOptions, OfflineStore, StoredRecord
from lmcache_async.tiers.results import drop_tracebacks, no_memory, read_results, run_each
from lmcache_async.types import ChunkKey

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 62  # a directory named without its config has no limit
_DELETE_BATCH = 256  # records deleted by a thread in one call
_WRITE_BATCH = 64  # records for which room is made together


class DiskTier(BundledTier[DiskConfig, "RecordStore"]):
    """One file per record, by direct I/O if the file system supports it.

    A record is written under a temporary name and renamed when it is complete, so a file under its final name
    is whole, however the process ended. The records are found again at the next start. A record that is being
    read is not evicted. Removing a record does not disturb its readers, whose file is open. A corrupt record
    is a miss, counted by cause, logged at most twice a minute, and deleted or moved to the quarantine.

    A call that is cancelled while a thread works on it ends when the thread has finished; a record that the thread
    has published stays.
    """

    config_type = DiskConfig

    def __init__(self, config: DiskConfig) -> None:
        super().__init__(config, f"disk tier of {config.root}")
        self._scrubbing: asyncio.Task[None] | None = None
        self._logger = LimitedLogger(logger)
        self._statistics = TierStatistics(max_bytes=config.max_bytes)

    @classmethod
    def offline(cls, config: DiskConfig, options: OfflineOptions) -> OfflineStore:
        return DiskRecords(config, options)

    @classmethod
    def directory_config(cls, path: Path) -> DiskConfig:
        return DiskConfig(path=path.absolute(), max_bytes=_UNBOUNDED)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            persistent=True,
            removes=True,
            lists=True,
            local_index=True,
            medium=Medium.DISK,
        )

    def diagnose(self, *, sample_bytes: int | None = None) -> Iterator[Check]:
        from lmcache_async.plugins.disk.diagnosis import check_directory  # psutil is in the extra cli

        return check_directory(self.config, sample_bytes)

    async def contains(self, key: ChunkKey) -> bool:
        return key in self._usable().index

    def lacks(self, key: ChunkKey) -> bool:
        return key not in self._usable().index

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        index = self._usable().index
        index.policy.touch(keys, gapless=False)
        return [key in index for key in keys]

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """Read the records. If there is no memory for a chunk in time, the chunks after it are misses."""
        with self._call() as store, read_results(len(keys)) as results:
            await store.read(keys, allocate, results)
        return results

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        with self._call() as store:
            results = await store.write(items)
            store.index.policy.touch_each([key for key, _ in items])
        return results

    async def remove(self, key: ChunkKey) -> bool:
        with self._call() as store:
            return await store.delete([key]) == 1

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Delete a corrupt record or move it to the quarantine. It is not served again, even if neither is possible."""
        with self._call() as store:
            return await store.reject(key, cause)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        """Verify every record in the order of the index. Closing the tier ends it with TierClosedError."""
        with self._call() as store:
            return await store.scrub(max_bytes_per_s)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in tuple(self._usable().index):
            yield key

    async def clear(self) -> int:
        """Delete the records. Other files in the directory stay."""
        with self._call() as store:
            return await store.clear()

    def statistics(self) -> TierStatistics:
        """Return the statistics; after the tier was closed, the last ones."""
        if self._opened is not None:
            index = self._opened.index
            self._statistics = TierStatistics(
                chunks=len(index),
                bytes=index.used_bytes,
                max_bytes=index.max_bytes,
                evictions=index.evictions,
                corrupt=self._opened.corrupt.total(),
                corrupt_by_cause=dict(self._opened.corrupt),
            )
        return self._statistics

    async def __aenter__(self) -> Self:
        """Open: the directory is listed, no record is read.

        Raises:
            ConfigError: `odirect` is true and the file system refuses it.
            TierUnavailableError: Another process has locked the directory, or it cannot be used.
        """
        store = await RecordStore.open(self.config, self._max_record_bytes)
        store.index.on_evicted = self.on_evicted
        self._open(store)
        if self.config.scrub_interval_s:
            self._scrubbing = asyncio.create_task(self._scrub_periodically(self.config.scrub_interval_s))
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close after the running calls have ended. The records stay.

        If cancelled, it does not wait for them. The directory stays locked until the last of them has ended.
        """
        store = self._usable()
        self.statistics()
        if self._scrubbing is not None:
            self._scrubbing.cancel()
        store.closing.set()
        try:
            await self._end_calls()
        except BaseException:
            store.close_later()
            raise
        store.close()

    async def _scrub_periodically(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.scrub(max_bytes_per_s=self.config.scrub_max_bytes_per_s)
            except (TierError, OSError) as error:  # OSError: no memory for its buffer
                line = "a scrub of %s ended early; the next one starts in %s s: %s"
                self._logger.report("scrub", line, self.config.root, interval_s, error)


class RecordStore:
    """The records of one open directory: its index, files and threads. Used on one event loop.

    The index agrees with the files at every moment. A call that is cancelled while a thread works on it ends when
    the thread has finished and the index contains the outcome.

    Attributes:
        directory: Locked by this process; not open in a forked child.
        closing: Set when the tier is closed; ends scrubs.
    """

    def __init__(
        self, config: DiskConfig, threads: DiskThreads, directory: RecordDirectory, max_record_bytes: int
    ) -> None:
        self.index = DiskIndex(config.max_bytes)
        self.corrupt: collections.Counter[str] = collections.Counter()
        self.directory = directory
        self.closing = asyncio.Event()
        self._max_record_bytes = max_record_bytes
        self._threads = threads
        self._num_threads = config.io_threads
        self._files = RecordFiles(
            directory,
            direct=detect_direct(directory, config.odirect),
            fsync=config.fsync,
            max_quarantine_bytes=config.max_quarantine_bytes if config.quarantine else None,
        )
        self._reads = RecordReads(self._files, threads.reads, config.io_threads)
        self._logger = LimitedLogger(logger)
        self._locks = KeyLocks()

    @classmethod
    async def open(cls, config: DiskConfig, max_record_bytes: int) -> RecordStore:
        """Lock the directory, delete temporary files, list the records, and delete excess and corrupt ones.

        Args:
            max_record_bytes: Maximum size of a file. A longer one is corrupt.

        Raises:
            TierUnavailableError: Another process has locked the directory, or it cannot be used.
        """
        threads = DiskThreads(config.io_threads)
        future = threads.start(_open_store, config, threads, max_record_bytes)
        try:
            await wait_ended(future, abandon=True)
        except BaseException:
            threads.close_later(lambda: _close_directory(future))
            raise
        try:
            return future.result()
        except OSError as error:
            threads.close()
            raise TierUnavailableError(
                f"cannot open {config.root}: {error}; set `path` of the disk tier to a directory that user"
                f" {os.geteuid()} can write to"
            ) from error
        except BaseException:
            threads.close()
            raise

    def load(self, found: Sequence[StoredRecord]) -> None:
        """Add the records of the directory to the index, and delete excess and corrupt ones. Blocking."""
        # After a power failure, a file may have a size that no record has.
        whole = [each for each in found if 0 < each.nbytes <= MAX_RECORD_BYTES and each.nbytes % PAGE == 0]
        kept = {record.key for record in whole}
        corrupt = [record.key for record in found if record.key not in kept]
        _, failure = self._files.reject(corrupt, "length")
        if failure is not None:
            raise failure
        if corrupt:
            self.corrupt["length"] = len(corrupt)
            logger.warning(
                "%s: %d record files of an invalid size were deleted or quarantined",
                self.directory.root,
                len(corrupt),
            )
        _, failure = self._files.delete(self.index.load(whole))
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._threads.close()
        self.directory.close()

    def close_later(self) -> None:
        """Close when the calls in threads have ended, without waiting for them.

        The directory stays locked until then, so these calls do not write to a directory of another owner.
        """
        self._threads.close_later(self.directory.close)

    async def read(
        self, keys: Sequence[ChunkKey], allocate: Allocate, results: list[Buffer | TierError | None]
    ) -> None:
        """Read records of one prompt into memory of `allocate` and store the buffers and errors in `results`.

        The chunks count as used, in memory and on disk.
        """
        self.index.policy.touch(keys, gapless=True)
        stamps = self.index.restamp(keys)
        stamped: list[Future[None]] = []
        if stamps:
            with contextlib.suppress(TierError):  # no thread can be started
                stamped.append(self._threads.start(self._files.set_stamps, stamps, pool=self._threads.stamps))
        batch = self._reads.open_batch()
        entries: dict[int, Entry] = {}
        reading: list[ChunkKey] = []

        def drop(position: int) -> None:
            buffer, results[position] = results[position], None
            assert isinstance(buffer, Buffer)
            buffer.release()

        try:
            for position, key in enumerate(keys):
                if (entry := self.index.entry(key)) is None:
                    continue
                entries[position] = entry
                if entry.nbytes > self._max_record_bytes:
                    batch.outcomes[position] = too_long(key, entry.nbytes, self._max_record_bytes)
                    continue
                self.index.begin_reading(key)
                reading.append(key)
                try:
                    results[position] = buffer = await allocate(entry.nbytes)
                except BudgetExceededError as error:  # the chunks that got memory are usable
                    results[position] = no_memory(error)
                    break
                self._reads.start(batch, position, key, buffer.padded_view)
            self._reads.close_batch(batch)
            await asyncio.wait([batch.ended])
        except BaseException:
            for position in self._reads.close_batch(batch, withdraw=True):
                drop(position)
            await wait_done(batch.ended)
            raise
        finally:
            for key in reading:
                self.index.end_reading(key)
            await wait_ended(*stamped)
        for position, outcome in batch.outcomes.items():
            result = results[position]
            if isinstance(outcome, int):
                assert isinstance(result, Buffer)
                result.resize(outcome)
                continue
            if result is not None:
                drop(position)
            try:
                await self._drop_unreadable(keys[position], entries[position], outcome)
            except TierError as failure:
                results[position] = failure

    async def write(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        """Publish the records that do not exist. A running write of the same key is awaited first.

        Returns:
            For each record, None or the error: TierFullError, there is no room for it; TierUnavailableError, the file
            cannot be written; ChunkCorruptError, the bytes are not a record of that length.
        """
        results: list[TierError | None] = [None] * len(items)
        rest = await self._write_new(items, results)

        async def write(position: int) -> None:
            key, buffer = items[position]
            try:
                async with self._locks.locked(key):
                    if not await self._exists(key):
                        results[position] = await self._write_alone(key, buffer.padded_view, rest[position])
            except TierError as error:
                results[position] = error

        # Enough concurrent writes to keep all threads busy.
        await run_each(rest, write, min(len(rest), 4 * self._num_threads))
        return results

    async def _write_new(
        self, items: Sequence[tuple[ChunkKey, Buffer]], results: list[TierError | None]
    ) -> dict[int, Failure | None]:
        """Write the records that are not known, many at a time, which takes less of the event loop than single ones.

        Returns:
            Positions of the records that are left: None for those that may exist or are being written, otherwise why the
            file system had no room.
        """
        rest: dict[int, Failure | None] = {}
        left = collections.deque(range(len(items)))
        while left:
            batch: dict[ChunkKey, int] = {}
            while left and len(batch) < _WRITE_BATCH:
                key, position = items[left[0]][0], left.popleft()
                if key in batch or key in self._locks or key in self.index:
                    rest[position] = None
                else:
                    batch[key] = position
            if not batch:
                break
            with self._locks.locked_now(batch):
                outcomes = await self._write([(key, items[at][1].padded_view) for key, at in batch.items()])
            positions = list(batch.values())
            left.extendleft(reversed(positions[len(outcomes) :]))
            for position, outcome in zip(positions, outcomes, strict=False):
                if _is_no_space(outcome):
                    rest[position] = outcome
                elif outcome is not None:
                    results[position] = self._write_error(items[position][0], outcome)
        return rest

    async def _write_alone(
        self, key: ChunkKey, view: memoryview, outcome: Failure | None
    ) -> TierError | None:
        """Write one record.

        If the file system has less room than `max_bytes`, evict the size of the record and try once more.

        Args:
            outcome: Why an attempt has failed; None if there was none.
        """
        if outcome is None:
            [outcome] = await self._write([(key, view)])
        if _is_no_space(outcome):
            [evicted] = await self._write([(key, view)], evict_bytes=len(view))
            if not isinstance(evicted, TierFullError):  # otherwise nothing can be evicted
                outcome = evicted
        return None if outcome is None else self._write_error(key, outcome)

    def _write_error(self, key: ChunkKey, failure: Failure) -> TierError:
        if isinstance(failure, TierError):
            return failure
        kind = TierFullError if _is_no_space(failure) else TierUnavailableError
        error = kind(f"cannot write {self._path(key)}: {failure}")
        error.__cause__ = failure
        return error

    async def clear(self) -> int:
        """Delete all records; see `delete`. Records that another call writes or deletes at this moment are deleted too."""
        locked = [key for key in self._locks if key not in self.index]
        try:
            return await self.delete([*self.index, *locked])
        finally:  # the tier did not list them before
            self.index.report_removed([key for key in locked if key not in self.index])

    async def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Delete records. Return the number of those that existed.

        Raises:
            TierUnavailableError: Some could not be deleted; those are still in the index.
        """
        deleted = 0
        left = collections.deque(keys)
        while left:
            batch: list[ChunkKey] = []
            while left and len(batch) < _DELETE_BATCH and left[0] not in self._locks:
                batch.append(left.popleft())
            if batch:
                with self._locks.locked_now(batch):
                    deleted += await self._delete(batch)
            else:
                await self._locks.wait_released(left[0])
        return deleted

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Delete a corrupt record or move it to the quarantine. Return whether it existed."""
        async with self._locks.locked(key):
            return await self._reject(key, cause)

    async def scrub(self, max_bytes_per_s: int | None) -> ScrubReport:
        """Verify the records that exist now, one at a time and without a slab. It does not count as use."""
        chunks = nbytes = errors = 0
        corrupt: collections.Counter[str] = collections.Counter()
        loop = asyncio.get_running_loop()
        due = loop.time()
        scratch = memoryview(mmap.mmap(-1, PIECE_BYTES))  # aligned
        for key in tuple(self.index):
            entry = self.index.entry(key)
            if entry is None or key in self._locks:
                continue
            record_bytes = entry.nbytes
            try:
                error = await self._verify(key, entry, scratch)
            except TierUnavailableError as failure:
                self._logger.report("scrub", "scrub: %s; the record is read again by the next scrub", failure)
                errors += 1
                record_bytes = 0
            else:
                if error is None:
                    chunks += 1
                elif isinstance(error, ChunkCorruptError):
                    corrupt[error.cause] += 1
                else:  # it was deleted
                    continue
            nbytes += record_bytes
            if max_bytes_per_s is not None:
                due = max(due, loop.time() - 1) + record_bytes / max_bytes_per_s
            await self._pause(max(0.0, due - loop.time()))
        return ScrubReport(chunks=chunks, bytes=nbytes, corrupt=dict(corrupt), errors=errors)

    async def _pause(self, seconds: float) -> None:
        """Wait. Raise TierClosedError when the tier is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.closing.wait()
        if self.closing.is_set():
            raise TierClosedError(f"the disk tier of {self.directory.root} was closed")

    async def _verify(self, key: ChunkKey, entry: Entry, scratch: memoryview) -> Failure | None:
        self.index.begin_reading(key)
        try:
            future = self._threads.start(self._files.verify, key, entry.nbytes, scratch)
            await wait_ended(future)
        finally:
            self.index.end_reading(key)
        error = future.result()
        if error is not None:
            await self._drop_unreadable(key, entry, error)
        return error

    async def _drop_unreadable(self, key: ChunkKey, entry: Entry, error: Exception) -> None:
        """Remove a record that is missing or corrupt from the index. Raise any other error."""
        is_current = self.index.entry(key) is entry and key not in self._locks
        if isinstance(error, ChunkCorruptError):
            self.corrupt[error.cause] += 1
            line = "%s is corrupt (%s: %s); it is a miss and is not served again"
            self._logger.report(f"corrupt.{error.cause}", line, self._path(key), error.cause, error)
            if is_current:
                self.index.report_removed([key])
                with self._locks.locked_now([key]):
                    await self._reject(key, error.cause)
        elif isinstance(error, FileNotFoundError):
            if is_current and (taken := self.index.take(key)) is not None:
                self.index.forget(taken)
                self.index.report_removed([key])
        elif isinstance(error, OSError | TierError):
            raise TierUnavailableError(f"cannot read {self._path(key)}: {error}") from error
        else:
            raise error

    async def _exists(self, key: ChunkKey) -> bool:
        """Return whether the record is in the index and on disk. Delete it if its file is missing or has another size."""
        entry = self.index.entry(key)
        if entry is None:
            return False
        try:
            status = await run_shielded(  # closing the tier blocks until its threads have ended
                aiofiles.os.stat(
                    self.directory.record_name(key),
                    dir_fd=self.directory.fd,
                    follow_symlinks=False,
                    executor=self._threads.calls,
                )
            )
        except RuntimeError as error:
            raise not_started(error) from error
        except OSError:
            pass  # the file is missing, or cannot be used
        else:
            if stat.S_ISREG(status.st_mode) and status.st_size == entry.nbytes:
                return True
        await self._delete([key])
        self.index.report_removed([key])
        return False

    async def _write(
        self, records: Sequence[tuple[ChunkKey, memoryview]], *, evict_bytes: int = 0
    ) -> list[Failure | None]:
        """Make room for new records, whose keys are locked by the caller, then write and publish them.

        Returns:
            Outcomes of the leading records for which there is room together, at least of the first. After a failure no
            part of a record is left.
        """
        reservations: list[Reservation] = []
        for key, view in records:
            try:
                reserved = self.index.reserve(key, len(view), busy=self._locks, evict_bytes=evict_bytes)
            except TierFullError as error:
                if not reservations:
                    return [drop_tracebacks(error)]
                break
            reservations.append(reserved)
        victims = [victim for reservation in reservations for victim in reservation.victims]
        left = frozenset(victims)  # of which the files are not deleted
        written: dict[int, Failure | None] = {}
        failure: Failure | None = None  # why the other records are not written
        try:
            undeletable = [each for each in self.index.undeletable if each not in self._locks]
            with self._locks.locked_now([*victims, *undeletable]):
                if victims or undeletable:
                    room = self._threads.start(
                        self._files.delete, (*undeletable, *victims), pool=self._threads.deletions
                    )
                    try:
                        await wait_ended(room)
                    finally:
                        if _succeeded(room):
                            left, failure = room.result()
                            self.index.drop_undeletable([each for each in undeletable if each not in left])
                    _check_ended(room)
                batch = WriteBatch(
                    self._files,
                    {
                        at: (*records[at], reservation.entry.stamp)
                        for at, reservation in enumerate(reservations)
                        if left.isdisjoint(reservation.victims)
                    },
                )
                written = batch.outcomes
                await self._run(batch)
        except TierError as error:  # no thread can be started
            failure = drop_tracebacks(error)
        finally:
            for at, reservation in enumerate(reservations):
                if written.get(at, reservation) is None:
                    self.index.commit(reservation)
                elif at in written and self._files.is_left(reservation.key):
                    self.index.commit(reservation)
                    self.index.take(reservation.key)
                    self.index.add_undeletable(reservation.key, reservation.entry)
                else:
                    self.index.cancel(reservation, left=left)
        return [written.get(at, failure) for at in range(len(reservations))]

    async def _run(self, batch: WriteBatch) -> None:
        """Write the records of a batch in several threads. If cancelled, those that a thread has begun are written."""
        calls: list[Future[None]] = []
        try:
            # `extend` adds them one by one, so that those before an error are awaited.
            calls.extend(self._threads.start(batch.run) for _ in range(min(self._num_threads, len(batch))))
        finally:  # if a call cannot be started, those before it still use the records
            await wait_ended(*calls, on_cancel=batch.withdraw)
        for call in calls:
            _check_ended(call)

    async def _delete(self, keys: Sequence[ChunkKey]) -> int:
        deleted, error = await self._remove(keys, self._files.delete, self.index.restore)
        if error is not None:
            raise TierUnavailableError(f"cannot delete records of {self.directory.root}: {error}") from error
        return deleted

    async def _reject(self, key: ChunkKey, cause: str) -> bool:
        reject = functools.partial(self._files.reject, cause=cause)
        rejected, error = await self._remove([key], reject, self.index.add_undeletable)
        if error is not None:
            line = "cannot delete %s: %s; it is not served again"
            self._logger.report("reject", line, self._path(key), error)
        return rejected == 1

    async def _remove(
        self,
        keys: Sequence[ChunkKey],
        remove: Callable[[Sequence[ChunkKey]], tuple[frozenset[ChunkKey], Failure | None]],
        keep: Callable[[ChunkKey, Entry], None],
    ) -> tuple[int, Failure | None]:
        """Take records out of the index and delete their files by `remove` in a thread.

        `keep` is called for each record whose file is left. Return the number of records that were in the index, and
        the error of `remove`.
        """
        entries = {key: entry for key in keys if (entry := self.index.take(key)) is not None}
        if not entries:
            return 0, None
        future: Future[tuple[frozenset[ChunkKey], Failure | None]] | None = None
        try:
            future = self._threads.start(remove, tuple(entries), pool=self._threads.deletions)
            await wait_ended(future)
        finally:
            if future is None or future.cancelled():
                left, error = frozenset(entries), None
            else:
                left, error = future.result()
            for key, entry in entries.items():
                if key in left:
                    keep(key, entry)
                else:
                    self.index.forget(entry)
        if future.cancelled():
            raise TierClosedError("the disk tier was closed before the record was deleted")
        return len(entries), error

    def _path(self, key: ChunkKey) -> str:
        return f"{self.directory.root}/{self.directory.record_name(key)}"


def _open_store(config: DiskConfig, threads: DiskThreads, max_record_bytes: int) -> RecordStore:
    """Open the directory and its index. Blocking."""
    directory = RecordDirectory(config.root)
    with contextlib.ExitStack() as stack:
        stack.callback(directory.close)
        found = directory.open()
        _warn_if_shared(directory)
        store = RecordStore(config, threads, directory, max_record_bytes)
        store.load(found)
        stack.pop_all()
        return store


def _warn_if_shared(directory: RecordDirectory) -> None:
    mode = stat.S_IMODE(os.fstat(directory.fd).st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning(
            "%s has mode %o: other users can write records to it; run chmod 700 unless this is intended",
            directory.root,
            mode,
        )


def _close_directory(future: Future[RecordStore]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().directory.close()


def _is_no_space(failure: Failure | None) -> bool:
    """Whether the file system has no room, which may be less than `max_bytes`."""
    return isinstance(failure, OSError) and failure.errno in NO_SPACE


def _check_ended(future: Future[Any]) -> None:
    """Raise the exception of a call, or TierClosedError if closing the tier has cancelled it."""
    if future.cancelled():
        raise TierClosedError("the disk tier was closed before the record was written")
    future.result()


def _succeeded(future: Future[Any]) -> bool:
    """Whether the call ended without an exception."""
    return future.done() and not future.cancelled() and future.exception() is None
