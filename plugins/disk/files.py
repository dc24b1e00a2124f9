"""Record files of the disk tier: write, read and delete, in threads.

Functions that run in a thread return their failure without a traceback instead of raising it. The frames of a
traceback would keep views of a slab alive.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import operator
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from lmcache_async.errors import ChunkCorruptError, TierClosedError, TierError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.header import peek_sizes
from lmcache_async.memory.proof import prove
from lmcache_async.memory.threads import WorkerPool
from lmcache_async.tiers.results import drop_tracebacks
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_async.plugins.disk.directory import Quarantine, RecordDirectory

READ_PIECE_BYTES = 2 << 20
"""Large enough for the full speed of the disk, small enough for a record of 8 MiB to occupy four threads."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors of opening a name that is a link, a socket, a pipe or a directory.
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.EISDIR})

Failure: TypeAlias = OSError | TierError

T = TypeVar("T")


class RecordFiles:
    """Writes, reads and deletes record files in one directory. Blocking.

    A record is written under a temporary name and renamed when it is complete.

    Args:
        directory: Open.
        direct: Whether to use direct I/O.
        fsync: Whether a write returns only when it is durable.
        quarantine: Keeps rejected records; without it they are deleted.
        reads: Shared by all threads that call `read`.
    """

    def __init__(
        self,
        directory: RecordDirectory,
        *,
        direct: bool,
        fsync: bool,
        quarantine: Quarantine | None = None,
        reads: ParallelReads | None = None,
    ) -> None:
        self._directory = directory
        self._fsync = fsync
        self._quarantine = quarantine
        self._reads = reads or ParallelReads()
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)

    def write(self, key: ChunkKey, view: memoryview, stamp: int) -> Failure | None:
        """Write and publish a record. After a failure no part of it is left.

        Args:
            view: The record in whole pages; the bytes after the end of the record have no meaning.
            stamp: mtime of the file, in ns.
        """
        try:
            _record_size(view)
            name = self._directory.temporary_name(key)
            try:
                descriptor = self._create(name)
            except FileNotFoundError:  # the directory was deleted
                self._directory.prepare()
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
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._directory.fd)
                raise
        except (OSError, TierError) as error:
            return drop_tracebacks(error)
        return None

    def read(self, key: ChunkKey, view: memoryview) -> int | Failure:
        """Read a record into `view`, which has the size of its file. Return the size of the record."""
        try:
            ticket = self._reads.ticket()
            with self._opened(key, len(view)) as descriptor:
                nbytes = self._reads.read(ticket, descriptor, view)
            if nbytes != len(view):
                raise _wrong_length(key, f"{nbytes} bytes were read of {len(view)}")
            return _record_size(view)
        except (OSError, TierError) as error:
            return drop_tracebacks(error)

    def verify(self, key: ChunkKey, nbytes: int, scratch: memoryview) -> Failure | None:
        """Read a file of that size piece by piece into `scratch`, and verify its record."""
        try:
            with self._opened(key, nbytes) as descriptor:
                record_bytes = prove(_pieces(descriptor, nbytes, scratch), key=key)
            if pages(record_bytes) != nbytes:
                raise _wrong_length(key, f"the header says {record_bytes} bytes, the file has {nbytes}")
        except (OSError, TierError) as error:
            return drop_tracebacks(error)
        return None

    def make_room(
        self, victims: Sequence[ChunkKey], undeletable: Sequence[ChunkKey]
    ) -> tuple[frozenset[ChunkKey], Failure | None]:
        """Delete the victims, and those records that could not be deleted before.

        Returns:
            The records that are still there, and why a victim could not be deleted.
        """
        undeleted, _ = self.delete(undeletable)
        left, error = self.delete(victims)
        return undeleted | left, error

    def delete(self, keys: Sequence[ChunkKey]) -> tuple[frozenset[ChunkKey], Failure | None]:
        """Delete records. Return those that are still there, and why."""
        left: set[ChunkKey] = set()
        error: Failure | None = None
        for key in keys:
            try:
                os.unlink(self._directory.record_name(key), dir_fd=self._directory.fd)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue  # there is no record file
            except (OSError, TierError) as failure:
                left.add(key)
                error = drop_tracebacks(failure)
        return frozenset(left), error

    def reject(self, key: ChunkKey, cause: str) -> Failure | None:
        """Move a corrupt record to the quarantine, or delete it."""
        if self._quarantine is not None:
            with contextlib.suppress(OSError, TierError):  # it is deleted then
                self._quarantine.take(key, cause)
                return None
        return self.delete([key])[1]

    def set_stamps(self, stamps: Sequence[tuple[ChunkKey, int]]) -> None:
        """Set the mtime of records. Failures are ignored: stamps only serve the order after a restart."""
        for key, stamp in stamps:
            with contextlib.suppress(OSError, TierError):
                os.utime(self._directory.record_name(key), ns=(stamp, stamp), dir_fd=self._directory.fd)

    def _status(self, key: ChunkKey) -> os.stat_result:
        return os.stat(self._directory.record_name(key), dir_fd=self._directory.fd, follow_symlinks=False)

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
                with contextlib.suppress(FileExistsError):  # another thread created it
                    os.mkdir(shard, 0o700, dir_fd=root)
                folder = stack.enter_context(self._directory.folder(shard))
                if self._fsync:
                    os.fsync(root)
            os.replace(name, record, src_dir_fd=root, dst_dir_fd=folder)
            if self._fsync:
                os.fsync(folder)

    @contextlib.contextmanager
    def _opened(self, key: ChunkKey, nbytes: int) -> Iterator[int]:
        """Descriptor of the record's file, which must have that size. Opening never blocks on a pipe."""
        flags = self._flags | os.O_RDONLY | os.O_NONBLOCK
        try:
            descriptor = os.open(self._directory.record_name(key), flags, dir_fd=self._directory.fd)
        except NotADirectoryError as error:
            raise FileNotFoundError(
                errno.ENOENT, "its directory is not a directory", error.filename
            ) from None
        except OSError as error:
            if error.errno in _NOT_A_FILE and not stat.S_ISREG(self._status(key).st_mode):
                raise _not_a_file(key) from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _not_a_file(key)
            if status.st_size != nbytes:
                raise _wrong_length(key, f"the file has {status.st_size} bytes, not {nbytes}")
            yield descriptor
        finally:
            os.close(descriptor)


class ParallelReads:
    """Reads files one after the other, each in pieces by all threads that read. Blocking.

    A disk is as fast with a few pieces in flight as with as many whole records, often faster. But whole
    records that are read side by side end together, and none can be verified and copied while the others are
    read.

    A thread leaves when its own file is read, and the last files would be read by one thread. Helpers are
    therefore started while fewer threads read than allowed.

    Args:
        piece_bytes: Approximate size of a piece.
        threads: Number of threads that read while there are pieces.
        start_helper: Starts a call in another thread at some later time. If it raises, no helper is started.
    """

    def __init__(
        self,
        piece_bytes: int = READ_PIECE_BYTES,
        *,
        threads: int = 1,
        start_helper: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._piece_bytes = piece_bytes
        self._threads = threads
        self._start_helper = start_helper
        self._tickets = itertools.count()
        self._waiting: list[_PiecewiseRead] = []  # a heap: those with pieces that no thread has begun
        self._changed = threading.Condition()
        self._reading = 0  # threads in `read`
        self._helping = 0  # helpers, started or running

    def ticket(self) -> int:
        """Return a number in the order of reads, for a file that is still to be opened."""
        return next(self._tickets)

    def read(self, ticket: int, descriptor: int, view: memoryview) -> int:
        """Fill `view` from the start of the file. Return the number of bytes up to the first missing one.

        The calling thread reads pieces of its own file and of files with lower tickets until its own is
        complete. On return no thread reads from the file or into `view` any more, and none refers to them.

        Raises:
            Exception: The error of one of its pieces, mostly an OSError.
        """
        own = _PiecewiseRead(ticket, descriptor, view, self._piece_bytes)
        with self._changed:
            heapq.heappush(self._waiting, own)
            self._reading += 1
            self._changed.notify_all()  # waiting threads can read its pieces
        try:
            self._start_helpers(except_for=1)  # this thread reads that one
            while (piece := self._next_piece(own)) is not None:
                self._read_piece(*piece)
                del piece
        finally:
            with self._changed:
                self._reading -= 1
            self._start_helpers()  # pieces of other files may be left
        return own.result()

    def _start_helpers(self, except_for: int = 0) -> None:
        """Start helpers for the pieces that no thread has begun, except for `except_for` of them."""
        if self._start_helper is None:
            return
        with self._changed:
            left = sum(read.num_left for read in self._waiting) - except_for
            count = max(min(self._threads - self._reading - self._helping, left), 0)
            self._helping += count
        for _ in range(count):
            try:
                self._start_helper(self._help)
            except Exception:  # noqa: BLE001 - reads go on without it; leaving `read` here would release memory in use
                with self._changed:
                    self._helping -= 1

    def _help(self) -> None:
        """Read pieces while there are any and fewer threads read than allowed."""
        try:
            while (piece := self._next_piece(None)) is not None:
                self._read_piece(*piece)
                del piece
        finally:
            with self._changed:
                self._helping -= 1

    def _next_piece(self, own: _PiecewiseRead | None) -> tuple[_PiecewiseRead, int] | None:
        """Take the first piece that no thread has begun; None when `own` has ended.

        A helper (`own` is None) does not wait for pieces, and ends when enough threads read files of their
        own.
        """
        with self._changed:
            while not (own.ended if own else self._reading + self._helping > self._threads):
                while self._waiting:
                    read = self._waiting[0]
                    start = read.begin_piece()
                    if start is not None:
                        return read, start
                    heapq.heappop(self._waiting)
                if own is None:
                    return None
                self._changed.wait()
            return None

    def _read_piece(self, read: _PiecewiseRead, start: int) -> None:
        error: Exception | None = None
        count = 0
        try:
            with read.piece(start) as piece:
                count = read_all(read.descriptor, piece, start)
        except Exception as failure:  # noqa: BLE001 - raised in the thread of the read
            error = failure.with_traceback(None)  # its frames refer to the piece
        with self._changed:
            if read.end_piece(start, count, error):
                self._changed.notify_all()


class _PiecewiseRead:
    """The read of one file: the pieces left and the outcome of those that were begun."""

    def __init__(self, ticket: int, descriptor: int, view: memoryview, piece_bytes: int) -> None:
        self.ticket = ticket
        self.descriptor = descriptor
        self.piece_bytes = piece_size(len(view), piece_bytes)
        self.view: memoryview | None = view
        starts = range(0, len(view), self.piece_bytes)
        self._starts: Iterator[int] = iter(starts)
        self._nbytes = len(view)
        self._gapless_bytes = len(view)  # from the start
        self._unfinished = len(starts)
        self._error: Exception | None = None

    def __lt__(self, other: _PiecewiseRead) -> bool:
        return self.ticket < other.ticket

    @property
    def num_left(self) -> int:
        """Number of pieces that no thread has begun."""
        return operator.length_hint(self._starts)

    @property
    def ended(self) -> bool:
        return self._unfinished == 0

    def begin_piece(self) -> int | None:
        """Return the offset of the next piece, or None."""
        return next(self._starts, None)

    def piece(self, start: int) -> memoryview:
        """The memory of the piece. Release it before `end_piece`."""
        assert self.view is not None  # until its last piece has ended
        return self.view[start : start + self.piece_bytes]

    def end_piece(self, start: int, count: int, error: Exception | None) -> bool:
        """Note the outcome of a piece. Return whether it was the last one."""
        self._unfinished -= 1
        if count < min(self.piece_bytes, self._nbytes - start):
            self._gapless_bytes = min(self._gapless_bytes, start + count)
        if error is not None:
            self._error = self._error or error
        if self.ended:
            self.view = None  # another thread may still refer to this read through the heap
        return self.ended

    def result(self) -> int:
        if self._error is not None:
            raise self._error
        return self._gapless_bytes


class DiskThreads:
    """Thread pools of the disk tier. A running call is always awaited, never abandoned.

    Deletions have a thread of their own, so that room is made while writes wait for theirs: deleting a file
    of 16 MiB takes ext4 about 4 ms, half of the time that writing it takes.
    """

    def __init__(self, num_threads: int) -> None:
        self.executor = WorkerPool(num_threads, thread_name_prefix="lmcache-disk")
        self._deleter = WorkerPool(1, thread_name_prefix="lmcache-disk-delete")
        self._helpers = WorkerPool(num_threads, thread_name_prefix="lmcache-disk-help")

    def start(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Start the call in a thread.

        Raises:
            TierClosedError: The tier was closed.
        """
        return _submit(self.executor, call, *args)

    def start_deletion(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Start the call in the thread for deletions, as `start`."""
        return _submit(self._deleter, call, *args)

    def start_helper(self, call: Callable[[], None]) -> None:
        """Start a call of `ParallelReads` in a further thread.

        Raises:
            RuntimeError: The tier was closed.
        """
        self._helpers.submit(call)

    def close(self) -> None:
        """Wait for running calls. There are none when every `wait_ended` has returned."""
        for pool in self._pools:
            pool.shutdown(wait=True)

    def close_later(self, when_ended: Callable[[], None]) -> None:
        """Start no further call. Call `when_ended`, in a thread, when the running calls have ended."""

        def wait() -> None:
            for pool in self._pools:
                pool.shutdown(wait=True, cancel_futures=True)
            when_ended()

        # A daemon thread, because a file system that never answers would keep the interpreter from ending.
        threading.Thread(target=wait, name="lmcache-disk-close", daemon=True).start()

    @property
    def _pools(self) -> tuple[WorkerPool, ...]:
        return self._deleter, self.executor, self._helpers


def _submit(pool: WorkerPool, call: Callable[..., T], *args: Any) -> Future[T]:
    try:
        return pool.submit(call, *args)
    except RuntimeError as error:
        raise TierClosedError(f"the disk tier was closed: {error}") from error


def pages(nbytes: int) -> int:
    """Round `nbytes` up to whole pages, the unit of direct I/O and of record files."""
    return -(-nbytes // PAGE) * PAGE


def piece_size(nbytes: int, target: int) -> int:
    """Return a size in whole pages that divides `nbytes` into nearly equal pieces of about `target` bytes.

    A record is its payload and a page. In pieces of exactly 2 MiB that page alone would be a read of its own.
    """
    count = max((nbytes + target // 2) // target, 1)
    return max(-(-nbytes // count // PAGE) * PAGE, PAGE)


def read_all(descriptor: int, view: memoryview, offset: int = 0) -> int:
    """Fill `view` from the offset of the file. Return the number of bytes, fewer if the file ends.

    Raises:
        OSError: The file cannot be read.
    """
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
    """The error of a record file that no buffer can hold."""
    return _wrong_length(key, f"the file has {nbytes} bytes, more than {max_bytes}")


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        written = os.pwrite(descriptor, view[done:], done)
        whole = written // PAGE * PAGE  # direct I/O continues at the start of a page
        if whole == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += whole


def _pieces(descriptor: int, nbytes: int, scratch: memoryview) -> Iterator[memoryview]:
    for offset in range(0, nbytes, len(scratch)):
        piece = scratch[: min(len(scratch), nbytes - offset)]
        yield piece[: read_all(descriptor, piece, offset)]


def _record_size(view: memoryview) -> int:
    """Return the size of the record in `view`, which must have whole pages and no more."""
    _, nbytes = peek_sizes(view[:PAGE])
    if pages(nbytes) != len(view):
        raise ChunkCorruptError(
            f"the record's header says {nbytes} bytes, but it has {len(view)}", cause="length"
        )
    return nbytes


def _wrong_length(key: ChunkKey, what: str) -> ChunkCorruptError:
    return ChunkCorruptError(f"record {key.hex()}: {what}", cause="length")


def _not_a_file(key: ChunkKey) -> ChunkCorruptError:
    return ChunkCorruptError(f"record {key.hex()}: not a regular file", cause="file")
