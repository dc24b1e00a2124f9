"""Record files of the disk tier: write, read and delete, in threads.

Functions that run in a thread return their failure without a traceback instead of raising it. The frames of a
traceback would keep views of a slab alive.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import heapq
import itertools
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from lmcache_async.errors import ChunkCorruptError, TierClosedError, TierError, TierUnavailableError
from lmcache_async.memory.buffer import PAGE, pages
from lmcache_async.memory.header import peek_sizes
from lmcache_async.memory.record import verify_stored
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.plugins.disk.directory import QUARANTINE_FOLDER, QUARANTINE_NAME, RecordDirectory
from lmcache_async.tiers.results import drop_tracebacks
from lmcache_async.types import ChunkKey

publish_file: Callable[..., tuple[int, bool]] | None
try:
    from lmcache_async.plugins.disk._publish import publish_file as compiled
except ImportError:  # installed where there was no C compiler
    publish_file = None
else:
    publish_file = compiled

READ_PIECE_BYTES = 2 << 20
"""Large enough for the full speed of the disk, small enough for a record of 8 MiB to occupy four threads."""

# Errors of opening a name that is a link, a socket, a pipe or a directory.
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.EISDIR})

Failure: TypeAlias = OSError | TierError

T = TypeVar("T")


class RecordFiles:
    """Writes, reads and deletes record files in one open directory. Blocking.

    A record is written under a temporary name and renamed when it is complete.

    Args:
        max_quarantine_bytes: Maximum bytes of the folder of corrupt records, which are not counted in the limit of the
            tier; the oldest are deleted. None to delete corrupt records.
    """

    def __init__(
        self,
        directory: RecordDirectory,
        *,
        direct: bool,
        fsync: bool,
        max_quarantine_bytes: int | None = None,
    ) -> None:
        self._directory = directory
        self._fsync = fsync
        self._max_quarantine_bytes = max_quarantine_bytes
        self._quarantine_lock = threading.Lock()
        self._delete_lock = threading.Lock()
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self._undeleted: set[str] = set()  # files of failed writes
        self._durable_folders: set[str] = set()  # with `fsync`: whose names in the root are durable

    def write(self, key: ChunkKey, view: memoryview, stamp: int) -> Failure | None:
        """Write and publish a record. After a failure no part of it is left.

        Args:
            view: The record in whole pages. The bytes after its end may be those of other records, so the file has zeros
                in their place.
            stamp: The mtime of the file in ns.
        """
        try:
            view = view[: _record_size(view)]
            with self._delete_lock:  # after its deletion, the name of a record may be used again
                for name in tuple(self._undeleted):
                    # If this fails, nothing is written: such files must not accumulate.
                    self._delete_failed(name)
            name = self._directory.temporary_name(key)
            if self._publish_at_once(name, key, view, stamp):
                return None
            try:
                descriptor = self._create(name)
            except FileNotFoundError:  # the directory was deleted
                self._directory.prepare()
                self._durable_folders.clear()
                descriptor = self._create(name)
            try:
                try:
                    _write_all(descriptor, view)
                    os.utime(descriptor, ns=(stamp, stamp))
                    if self._fsync:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                self._rename(name, key)
            except BaseException:
                self._discard(name)
                raise
        except (OSError, TierError) as error:
            return drop_tracebacks(error)
        return None

    def open(self, key: ChunkKey, nbytes: int | None = None) -> int:
        """Return a descriptor of the record's file. Opening never blocks on a pipe.

        Raises:
            ChunkCorruptError: It is not a regular file, or has another size than `nbytes`.
        """
        flags = self._flags | os.O_RDONLY | os.O_NONBLOCK
        try:
            with self._directory.folder_of(key) as (folder, name):
                descriptor = os.open(name, flags, dir_fd=folder)
        except NotADirectoryError as error:
            raise FileNotFoundError(
                errno.ENOENT, "its directory is not a directory", error.filename
            ) from None
        except OSError as error:
            if error.errno in _NOT_A_FILE and not stat.S_ISREG(self._status(key).st_mode):
                raise _not_a_file(key) from None
            raise
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _not_a_file(key)
            if nbytes is not None and status.st_size != nbytes:
                raise _wrong_length(key, f"the file has {status.st_size} bytes, not {nbytes}")
            undo.pop_all()
        return descriptor

    def verify(self, key: ChunkKey, nbytes: int, scratch: memoryview) -> Failure | None:
        """Read a file of that size piece by piece into `scratch`, and verify its record."""
        try:
            descriptor = self.open(key, nbytes)
            try:
                record_bytes = verify_stored(pieces(descriptor, scratch), key=key)
            finally:
                os.close(descriptor)
            if pages(record_bytes) != nbytes:
                raise _wrong_length(key, f"the header says {record_bytes} bytes, the file has {nbytes}")
        except (OSError, TierError) as error:
            return drop_tracebacks(error)
        return None

    def delete(self, keys: Sequence[ChunkKey]) -> tuple[frozenset[ChunkKey], Failure | None]:
        """Delete records. Return the keys of the files that are left, and the last error."""
        left: set[ChunkKey] = set()
        error: Failure | None = None
        for key in keys:
            try:
                with self._directory.folder_of(key) as (folder, name):
                    os.unlink(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue  # there is no record file
            except (OSError, TierError) as failure:
                left.add(key)
                error = drop_tracebacks(failure)
        return frozenset(left), error

    def reject(self, keys: Sequence[ChunkKey], cause: str) -> tuple[frozenset[ChunkKey], Failure | None]:
        """Move corrupt records to the quarantine, which is then trimmed, or delete them. Return the same as `delete`."""
        left = keys
        if self._max_quarantine_bytes is not None:
            left = []
            for key in keys:
                try:
                    self.quarantine(key, cause)
                except (OSError, TierError):  # it is deleted then
                    left.append(key)
            with contextlib.suppress(OSError):
                self._trim_quarantine(self._max_quarantine_bytes)
        return self.delete(left)

    def quarantine(self, key: ChunkKey, cause: str) -> None:
        """Move a record to the folder of corrupt records. Its name there is its key and the cause."""
        word = "".join(letter for letter in cause.lower() if "a" <= letter <= "z") or "unknown"
        if not stat.S_ISREG(self._status(key).st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", self._directory.record_name(key))
        with self._quarantine_lock:
            with contextlib.suppress(FileExistsError):
                os.mkdir(QUARANTINE_FOLDER, 0o700, dir_fd=self._directory.fd)
            with (
                self._directory.folder_of(key) as (source, name),
                self._directory.folder(QUARANTINE_FOLDER) as target,
            ):
                os.rename(name, f"{name}.{word}", src_dir_fd=source, dst_dir_fd=target)

    def _trim_quarantine(self, max_bytes: int) -> None:
        """Delete the oldest corrupt records beyond the limit."""
        with self._quarantine_lock, contextlib.suppress(FileNotFoundError):
            files = sorted(
                (status.st_ctime_ns, name, status.st_size)
                for name, status in self._directory.list_files(QUARANTINE_FOLDER, QUARANTINE_NAME)
            )
            excess = sum(nbytes for _, _, nbytes in files) - max_bytes
            for _, name, nbytes in files:
                if excess <= 0:
                    break
                os.unlink(f"{QUARANTINE_FOLDER}/{name}", dir_fd=self._directory.fd)
                excess -= nbytes

    def set_stamps(self, stamps: Sequence[tuple[ChunkKey, int]]) -> None:
        """Set the mtime of records. Failures are ignored: stamps only determine the eviction order after a restart."""
        for key, stamp in stamps:
            with contextlib.suppress(OSError, TierError), self._directory.folder_of(key) as (folder, name):
                os.utime(name, ns=(stamp, stamp), dir_fd=folder, follow_symlinks=False)

    def is_left(self, key: ChunkKey) -> bool:
        """Whether the file of a failed write was published and could not be deleted yet."""
        return self._directory.record_name(key) in self._undeleted

    def _discard(self, name: str) -> None:
        """Delete a file of a failed write, now or before the next write."""
        self._undeleted.add(name)
        with contextlib.suppress(OSError):
            self._delete_failed(name)

    def _delete_failed(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory.fd)
        self._undeleted.discard(name)

    def _status(self, key: ChunkKey) -> os.stat_result:
        with self._directory.folder_of(key) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def _publish_at_once(self, name: str, key: ChunkKey, view: memoryview, stamp: int) -> bool:
        """Write and publish a record by the compiled module, if that is possible. Return whether it is published."""
        if publish_file is None or self._fsync:
            return False
        folder, record = self._directory.record_name(key).split("/")
        error, created = publish_file(self._directory.fd, name, self._flags, view, stamp, folder, record)
        if created and error:
            self._discard(name)
        if error not in (0, errno.ENOENT):  # ENOENT: the directory was deleted
            raise OSError(error, os.strerror(error), name)
        return not error

    def _create(self, name: str) -> int:
        flags = self._flags | os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.open(name, flags, 0o600, dir_fd=self._directory.fd)

    def _rename(self, name: str, key: ChunkKey) -> None:
        root = self._directory.fd
        shard, record = self._directory.record_name(key).split("/")
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._directory.folder(shard))
            except FileNotFoundError:
                self._durable_folders.discard(shard)
                with contextlib.suppress(FileExistsError):  # another thread created it
                    os.mkdir(shard, 0o700, dir_fd=root)
                folder = stack.enter_context(self._directory.folder(shard))
            os.replace(name, record, src_dir_fd=root, dst_dir_fd=folder)
            if self._fsync:
                try:
                    self._sync_folder(shard, folder)
                except BaseException:
                    self._discard(f"{shard}/{record}")
                    raise

    def _sync_folder(self, shard: str, folder: int) -> None:
        os.fsync(folder)
        if shard not in self._durable_folders:  # another thread or an earlier process may have created it
            os.fsync(self._directory.fd)
            self._durable_folders.add(shard)


class WriteBatch:
    """Records that several threads write, each record by one thread.

    Args:
        records: By position, the arguments of `RecordFiles.write`.

    Attributes:
        outcomes: By position, None if the record is published, or why it is not. A record that no thread has begun has
            no outcome.
    """

    def __init__(self, files: RecordFiles, records: Mapping[int, tuple[ChunkKey, memoryview, int]]) -> None:
        self.outcomes: dict[int, Failure | None] = {}
        self._files = files
        self._left = collections.deque(records.items())

    def __len__(self) -> int:
        """Return the number of records that no thread has begun."""
        return len(self._left)

    def run(self) -> None:
        """Write records until all are begun. Called in each thread."""
        while True:
            try:
                position, record = self._left.popleft()
            except IndexError:
                return
            self.outcomes[position] = self._files.write(*record)

    def withdraw(self) -> None:
        """Leave out the records that no thread has begun."""
        self._left.clear()


class ReadBatch:
    """The reads of one call: started on the event loop, read by threads of `RecordReads`.

    Attributes:
        outcomes: By position, the size of the record, or why it was not read. Withdrawn reads have none.
        ended: Done when no thread reads for the call, after `RecordReads.close_batch`.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.outcomes: dict[int, int | Exception] = {}
        self.running: dict[int, _Read] = {}
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def notify_ended(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.set_ended)

    def set_ended(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True, eq=False)
class _Read:
    """The read of one record. Its state is guarded by the lock of `RecordReads`."""

    batch: ReadBatch
    position: int
    order: tuple[int, int]  # priority of the batch, arrival
    key: ChunkKey
    view: memoryview | None  # None when the read has ended, so that no thread refers to the memory
    begun: bool = False
    descriptor: int = -1
    piece_bytes: int = 0
    unfinished: int = 0
    gapless_bytes: int = 0  # from the start of the file
    error: Exception | None = None


_OPEN = -1  # in place of the start of a piece: open the file


class RecordReads:
    """Reads records in pieces, in several threads. Pieces of older calls are read first.

    A disk reads a few pieces concurrently as fast as the same number of whole records, often faster. Whole records
    that are read concurrently also finish together, so none of them can be verified and copied while the others are
    read.
    """

    def __init__(
        self, files: RecordFiles, pool: WorkerPool, threads: int, piece_bytes: int = READ_PIECE_BYTES
    ) -> None:
        self._files = files
        self._pool = pool
        self._threads = threads
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._batches = itertools.count()
        self._arrivals = itertools.count()
        # A heap of pieces that no thread has begun: order of the read, start of the piece, read.
        self._waiting: list[tuple[tuple[int, int], int, _Read]] = []
        self._workers: set[object] = set()

    def open_batch(self) -> ReadBatch:
        """Return the batch of a new call. It has a lower priority than those of older calls."""
        return ReadBatch(next(self._batches))

    def start(self, batch: ReadBatch, position: int, key: ChunkKey, view: memoryview) -> None:
        """Read a record into `view`, which has the size of its file, as soon as a thread is free."""
        read = _Read(batch, position, (batch.priority, next(self._arrivals)), key, view)
        with self._lock:
            batch.running[position] = read
            heapq.heappush(self._waiting, (read.order, _OPEN, read))
        try:
            self._add_worker()
        except RuntimeError as error:
            raise not_started(error) from error

    def close_batch(self, batch: ReadBatch, *, withdraw: bool = False) -> list[int]:
        """Note that no read will be added. Return the positions of withdrawn reads.

        With `withdraw`, the reads that no thread has begun are withdrawn; otherwise none.
        """
        with self._lock:
            batch.closed = True
            withdrawn = [at for at, read in batch.running.items() if withdraw and not read.begun]
            for position in withdrawn:
                batch.running.pop(position).view = None
            if not batch.running:
                batch.set_ended()
        return withdrawn

    def _add_worker(self) -> None:
        """Start a worker if fewer than the maximum are running. If no thread can be started, the others read all pieces."""
        worker = object()
        with self._lock:
            if len(self._workers) >= self._threads:
                return
            self._workers.add(worker)
        try:
            self._pool.submit(self._work, worker)
        except BaseException as error:
            with self._lock:
                self._workers.discard(worker)
                others = bool(self._workers)
            if not (others and isinstance(error, RuntimeError)):
                raise

    def _work(self, worker: object) -> None:
        """Read until no piece is left. A pool that failed to start a thread may still call this later."""
        while (task := self._next(worker)) is not None:
            read, start = task
            if start == _OPEN:
                self._open(read)
            else:
                self._read_piece(read, start)
            del task, read

    def _next(self, worker: object) -> tuple[_Read, int] | None:
        """Take the first piece that no thread has begun; None if there is none."""
        with self._lock:
            while self._waiting:
                _, start, read = heapq.heappop(self._waiting)
                if read.view is not None:  # not withdrawn
                    read.begun = True
                    return read, start
            self._workers.discard(worker)
            return None

    def _open(self, read: _Read) -> None:
        assert read.view is not None
        read.gapless_bytes = nbytes = len(read.view)
        try:
            read.piece_bytes = piece_size(nbytes, self._piece_bytes)
            starts = range(0, nbytes, read.piece_bytes)
            read.descriptor = self._files.open(read.key, nbytes)
        except Exception as error:  # noqa: BLE001 - raised on the event loop
            read.error = error
            self._finish(read)
            return
        read.unfinished = len(starts)
        with self._lock:
            for start in starts:
                heapq.heappush(self._waiting, (read.order, start, read))
        with contextlib.suppress(Exception):  # this thread reads all pieces then
            for _ in starts[1:]:
                self._add_worker()

    def _read_piece(self, read: _Read, start: int) -> None:
        assert read.view is not None
        error: Exception | None = None
        count, nbytes = 0, min(read.piece_bytes, len(read.view) - start)
        try:
            with read.view[start : start + nbytes] as piece:
                count = read_all(read.descriptor, piece, start)
        except Exception as failure:  # noqa: BLE001 - raised on the event loop
            error = drop_tracebacks(failure)  # its frames refer to the piece
        with self._lock:
            if count < nbytes:
                read.gapless_bytes = min(read.gapless_bytes, start + count)
            read.error = read.error or error
            read.unfinished -= 1
            last = not read.unfinished
        if last:
            try:
                os.close(read.descriptor)
            except OSError as failure:  # some network file systems report errors here
                read.error = read.error or failure
            self._finish(read)

    def _finish(self, read: _Read) -> None:
        """Store the outcome of a read, when no thread has a view of its memory any more."""
        batch = read.batch
        outcome = _outcome(read)
        read.view = None
        with self._lock:
            del batch.running[read.position]
            batch.outcomes[read.position] = outcome
            ended = batch.closed and not batch.running
        if ended:
            batch.notify_ended()


def _outcome(read: _Read) -> int | Exception:
    """Return the size of the record, or the error if it was not read completely or is invalid."""
    assert read.view is not None
    if read.error is not None:
        return drop_tracebacks(read.error)
    if read.gapless_bytes != len(read.view):
        return _wrong_length(read.key, f"{read.gapless_bytes} bytes were read of {len(read.view)}")
    try:
        return _record_size(read.view)
    except Exception as error:  # noqa: BLE001 - raised on the event loop
        return drop_tracebacks(error)


class DiskThreads:
    """Thread pools of the disk tier. A running call is always awaited, never abandoned.

    Deletions have a separate thread, so that they make room while writes wait for a free thread: ext4 takes about 4 ms
    to delete a file of 16 MiB, half as long as to write it. Updates of stamps have a separate thread too. A read waits
    for its update of stamps and for the deletion of a corrupt record, so these must not queue behind writes.
    """

    def __init__(self, num_threads: int) -> None:
        self.calls = WorkerPool(num_threads, thread_name_prefix="lmcache-disk")
        self.deletions = WorkerPool(1, thread_name_prefix="lmcache-disk-delete")
        self.stamps = WorkerPool(1, thread_name_prefix="lmcache-disk-stamp")
        self.reads = WorkerPool(num_threads, thread_name_prefix="lmcache-disk-read")

    def start(self, call: Callable[..., T], *args: Any, pool: WorkerPool | None = None) -> Future[T]:
        """Start the call in a thread of `pool`, by default `calls`."""
        try:
            return (pool or self.calls).submit(call, *args)
        except RuntimeError as error:
            raise not_started(error) from error

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all calls; with `cancel`, cancel queued ones. None are left when every `wait_ended` has returned."""
        for pool in (self.deletions, self.calls, self.stamps, self.reads):
            # A call in `reads` serves all reads that were started; none of them would end without it.
            pool.shutdown(wait=True, cancel_futures=cancel and pool is not self.reads)

    def close_later(self, when_ended: Callable[[], None]) -> None:
        """Start no further call. Call `when_ended`, in a thread, when the running calls have ended.

        If the interpreter exits before, it does not wait for them, provided that the threads of the pools are daemon
        threads, that is, were started by one.
        """
        for pool in (self.deletions, self.calls, self.stamps, self.reads):
            pool.abandon()

        def wait() -> None:
            self.close(cancel=True)
            when_ended()

        # A daemon thread, because a file system that never answers would keep the interpreter from ending.
        threading.Thread(target=wait, name="lmcache-disk-close", daemon=True).start()


def not_started(error: RuntimeError) -> TierError:
    """Return the error for a call that no thread can run: the pools were shut down, or no thread can be started."""
    if "shutdown" in str(error):
        return TierClosedError(f"the disk tier was closed: {error}")
    return TierUnavailableError(
        f"no thread for the disk tier: {error}; raise the limit of threads or processes"
    )


def piece_size(nbytes: int, target: int) -> int:
    """Return a size in whole pages that divides `nbytes` into nearly equal pieces of about `target` bytes.

    A record is slightly longer than its payload. With pieces of exactly 2 MiB, the end would be a piece of its own.
    """
    count = max((nbytes + target // 2) // target, 1)
    return max(pages(-(-nbytes // count)), PAGE)


def read_all(descriptor: int, view: memoryview, offset: int = 0) -> int:
    """Fill `view` from the offset of the file. Return the number of bytes, fewer if the file ends."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
        if done % PAGE:  # the end of a truncated file
            break
    return done


def too_long(key: ChunkKey, nbytes: int, max_bytes: int) -> ChunkCorruptError:
    """Return the error for a record file that is longer than a buffer."""
    return _wrong_length(key, f"the file has {nbytes} bytes, more than {max_bytes}")


def _write_all(descriptor: int, view: memoryview) -> None:
    """Write a record at the start of the file, and zeros up to the end of its last page."""
    size = len(view) // PAGE * PAGE
    _write_pages(descriptor, view[:size], 0)
    if size < len(view):
        page = mmap.mmap(-1, PAGE)  # aligned for direct I/O
        page[: len(view) - size] = view[size:]
        _write_pages(descriptor, memoryview(page), size)


def _write_pages(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        written = os.pwrite(descriptor, view[done:], offset + done)
        whole = written // PAGE * PAGE  # direct I/O continues at the start of a page
        if whole == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += whole


def pieces(descriptor: int, scratch: memoryview) -> Iterator[memoryview]:
    """Yield the content of a file in pieces, each read into `scratch`."""
    offset = 0
    while (read := read_all(descriptor, scratch, offset)) == len(scratch):
        yield scratch
        offset += read
    yield scratch[:read]


def _record_size(view: memoryview) -> int:
    """Return the size of the record in `view`. Raise ChunkCorruptError if `view` has more or fewer pages."""
    _, nbytes = peek_sizes(view[:PAGE])
    if pages(nbytes) != len(view):
        raise ChunkCorruptError(
            f"the record's header says {nbytes} bytes, but the record has {len(view)}", cause="length"
        )
    return nbytes


def _wrong_length(key: ChunkKey, what: str) -> ChunkCorruptError:
    return ChunkCorruptError(f"record {key.hex()}: {what}", cause="length")


def _not_a_file(key: ChunkKey) -> ChunkCorruptError:
    return ChunkCorruptError(f"record {key.hex()}: not a regular file", cause="file")
