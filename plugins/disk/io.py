"""Record files: written whole and then published, read into a slab. Blocking; run in threads.

Failures are values and carry no traceback: its frames would keep views of the slab alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lmcache_async.errors import ChunkCorruptError, TierError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.header import peek_sizes
from lmcache_async.memory.proof import prove
from lmcache_async.plugins.disk.reading import SharedReads, read_all
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_async.plugins.disk.directory import RecordDirectory
    from lmcache_async.plugins.disk.quarantine import Quarantine

# What opening a record's name may say where there is no file but a link, a socket, a pipe or a directory.
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.EISDIR})

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One record to write.

    Attributes:
        view: The record in whole pages; its bytes behind the record's end mean nothing.
        stamp: The file's mtime in ns.
    """

    key: ChunkKey
    view: memoryview
    stamp: int


@dataclass(frozen=True, slots=True)
class RoomResult:
    """What making room came to.

    Attributes:
        error: Why a victim could not be deleted.
        left: Of the victims and the condemned, those that are there still.
    """

    error: OSError | TierError | None = None
    left: frozenset[ChunkKey] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read came to: the record's true length, or why it is not to be had."""

    nbytes: int = 0
    error: OSError | TierError | None = None


class Proven(NamedTuple):
    """What a scrub found: "" where the record is right, "error" where it could not be read."""

    nbytes: int
    cause: str


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to what direct I/O can transfer; the size of a record's file."""
    return -(-nbytes // PAGE) * PAGE


class RecordFiles:
    """Reads, writes and deletes in one directory.

    Args:
        directory: Open.
        direct: Whether to go around the page cache.
        fsync: Whether a write ends only when it is durable.
        quarantine: Takes what is rejected; without it that is deleted.
        reads: Shares reads out among threads; by default among those that call `read`.
    """

    def __init__(
        self,
        directory: RecordDirectory,
        *,
        direct: bool,
        fsync: bool,
        quarantine: Quarantine | None = None,
        reads: SharedReads | None = None,
    ) -> None:
        self._directory = directory
        self._fsync = fsync
        self._quarantine = quarantine
        self._reads = reads or SharedReads()
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)

    def make_room(self, victims: Sequence[ChunkKey], condemned: Sequence[ChunkKey]) -> RoomResult:
        """Delete the victims; and the condemned, where that is possible now."""
        left, _ = self.unlink(condemned)
        undeleted, error = self.unlink(victims)
        return RoomResult(error, left | undeleted)

    def write(self, job: WriteJob) -> OSError | TierError | None:
        """Write and publish; if there is an error, nothing of the record is left."""
        try:
            _check_sizes(job.view)
            self._publish(job)
        except (OSError, TierError) as failure:
            return _bare(failure)
        return None

    def read(self, key: ChunkKey, view: memoryview) -> ReadResult:
        """Fill `view`, which has the file's size."""
        try:
            place = self._reads.place()
            with self._opened(key, len(view)) as descriptor:
                nbytes = self._reads.read(place, descriptor, view)
            if nbytes != len(view):
                raise _wrong_length(key, f"the file gave {nbytes} bytes of {len(view)}")
            return ReadResult(_check_sizes(view))
        except (OSError, TierError) as error:
            return ReadResult(error=_bare(error))

    def prove(self, key: ChunkKey, nbytes: int, scratch: memoryview) -> ReadResult:
        """Read a record of that size in pieces, and prove that it is whole, unchanged and of that key."""
        try:
            with self._opened(key, nbytes) as descriptor:
                record_bytes = prove(_pieces(descriptor, nbytes, scratch), key=key)
            if pages(record_bytes) != nbytes:
                raise _wrong_length(key, f"the header says {record_bytes} bytes, the file has {nbytes}")
            return ReadResult(record_bytes)
        except (OSError, TierError) as error:
            return ReadResult(error=_bare(error))

    def has(self, key: ChunkKey, nbytes: int) -> bool:
        """Whether there is a file of that size for the record."""
        try:
            status = self._status(key)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == nbytes

    def unlink(self, keys: Sequence[ChunkKey]) -> tuple[frozenset[ChunkKey], OSError | TierError | None]:
        """Delete the records; those that are still there, and why."""
        left: set[ChunkKey] = set()
        error: OSError | TierError | None = None
        for key in keys:
            try:
                os.unlink(self._directory.record_name(key), dir_fd=self._directory.fd)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue  # no file of ours
            except (OSError, TierError) as failure:
                left.add(key)
                error = _bare(failure)
        return frozenset(left), error

    def reject(self, key: ChunkKey, cause: str) -> OSError | TierError | None:
        """Put a broken record where it is found no more; why it is still there."""
        if self._quarantine is not None:
            with contextlib.suppress(OSError, TierError):  # then it is deleted
                self._quarantine.take(key, cause)
                return None
        return self.unlink([key])[1]

    def set_stamps(self, stamps: Sequence[tuple[ChunkKey, int]]) -> None:
        """Note when records were used. Best effort: it is only for the order after a restart."""
        for key, stamp in stamps:
            with contextlib.suppress(OSError, TierError):
                os.utime(self._directory.record_name(key), ns=(stamp, stamp), dir_fd=self._directory.fd)

    def _status(self, key: ChunkKey) -> os.stat_result:
        return os.stat(self._directory.record_name(key), dir_fd=self._directory.fd, follow_symlinks=False)

    def _publish(self, job: WriteJob) -> None:
        name = self._directory.temporary_name(job.key)
        try:
            descriptor = self._create(name)
        except FileNotFoundError:  # the directory vanished
            self._directory.prepare()
            descriptor = self._create(name)
        try:
            try:
                _write_all(descriptor, job.view)
                os.utime(descriptor, ns=(job.stamp, job.stamp))
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._rename(name, job.key)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._directory.fd)
            raise

    def _create(self, name: str) -> int:
        flags = self._flags | os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.open(name, flags, 0o600, dir_fd=self._directory.fd)

    def _rename(self, name: str, key: ChunkKey) -> None:
        root = self._directory.fd
        shard, record = self._directory.record_name(key).split("/")
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._directory.directory(shard))
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another thread was faster
                    os.mkdir(shard, 0o700, dir_fd=root)
                folder = stack.enter_context(self._directory.directory(shard))
                if self._fsync:
                    os.fsync(root)
            os.replace(name, record, src_dir_fd=root, dst_dir_fd=folder)
            if self._fsync:
                os.fsync(folder)

    @contextlib.contextmanager
    def _opened(self, key: ChunkKey, nbytes: int) -> Iterator[int]:
        """The record's file, which has that size; opening waits for nothing, whatever lies there."""
        flags = self._flags | os.O_RDONLY | os.O_NONBLOCK
        try:
            descriptor = os.open(self._directory.record_name(key), flags, dir_fd=self._directory.fd)
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "its directory is no directory", error.filename) from None
        except OSError as error:
            if error.errno in _NO_FILE and not stat.S_ISREG(self._status(key).st_mode):
                raise _no_file(key) from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _no_file(key)
            if status.st_size != nbytes:
                raise _wrong_length(key, f"the file has {status.st_size} bytes, not {nbytes}")
            yield descriptor
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        written = os.pwrite(descriptor, view[done:], done)
        whole = written // PAGE * PAGE  # after a short write direct I/O goes on from a page's start
        if whole == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += whole


def _pieces(descriptor: int, nbytes: int, scratch: memoryview) -> Iterator[memoryview]:
    for offset in range(0, nbytes, len(scratch)):
        piece = scratch[: min(len(scratch), nbytes - offset)]
        yield piece[: read_all(descriptor, piece, offset)]


def _check_sizes(view: memoryview) -> int:
    """The length of the record that `view` holds in whole pages."""
    _, nbytes = peek_sizes(view[:PAGE])
    if pages(nbytes) != len(view):
        raise ChunkCorruptError(
            f"the record's header says {nbytes} bytes, but it has {len(view)}", cause="length"
        )
    return nbytes


def _wrong_length(key: ChunkKey, what: str) -> ChunkCorruptError:
    return ChunkCorruptError(f"record {key.hex()}: {what}", cause="length")


def too_long(key: ChunkKey, nbytes: int, max_bytes: int) -> ReadResult:
    """What a read of such a record comes to."""
    return ReadResult(error=_wrong_length(key, f"the file has {nbytes} bytes, more than {max_bytes}"))


def _no_file(key: ChunkKey) -> ChunkCorruptError:
    return ChunkCorruptError(f"record {key.hex()}: what lies there is no regular file", cause="file")


def _bare(error: E) -> E:
    """Without tracebacks, also of what caused it."""
    cause = error.__cause__ or error.__context__
    if cause is not None:
        _bare(cause)
    return error.with_traceback(None)
