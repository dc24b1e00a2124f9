"""Record files: written whole and then published, read into a slab. Blocking; run in threads.

Failures are values and carry no traceback: its frames would keep views of the slab alive.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lmcache_async.errors import ChunkCorruptError, ConfigError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.record import peek_sizes
from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lmcache_async.plugins.disk.directory import RecordDirectory


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One record to write.

    Attributes:
        view: The record in whole pages; its bytes behind the record's end mean nothing.
        stamp: The file's mtime in ns.
        victims: Records to delete first.
    """

    key: ChunkKey
    view: memoryview
    stamp: int
    victims: tuple[ChunkKey, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write came to.

    Attributes:
        error: None when the record is published; else nothing of it is left.
        left: Victims that could not be deleted.
    """

    error: OSError | ChunkCorruptError | None = None
    left: frozenset[ChunkKey] = frozenset()


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read came to: the record's true length, or why it is not to be had."""

    nbytes: int = 0
    error: OSError | ChunkCorruptError | None = None


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to what direct I/O can transfer; the size of a record's file."""
    return -(-nbytes // PAGE) * PAGE


class RecordFiles:
    """Reads, writes and deletes in one directory.

    Args:
        directory: Open.
        direct: Whether to go around the page cache.
        fsync: Whether a write ends only when it is durable.
    """

    def __init__(self, directory: RecordDirectory, *, direct: bool, fsync: bool) -> None:
        self._directory = directory
        self._fsync = fsync
        self._flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)

    def write(self, job: WriteJob) -> WriteResult:
        """Delete the victims, write, publish."""
        left, error = self.unlink(job.victims)
        if error is not None:
            return WriteResult(error, left)
        try:
            _check_sizes(job.view)
            self._publish(job)
        except (OSError, ChunkCorruptError) as failure:
            return WriteResult(failure.with_traceback(None))
        return WriteResult()

    def read(self, key: ChunkKey, view: memoryview) -> ReadResult:
        """Fill `view`, which has the file's size."""
        try:
            return ReadResult(self._read(key, view))
        except (OSError, ChunkCorruptError) as error:
            return ReadResult(error=error.with_traceback(None))

    def unlink(self, keys: Sequence[ChunkKey]) -> tuple[frozenset[ChunkKey], OSError | None]:
        """Delete the records; those that are still there, and why."""
        left: set[ChunkKey] = set()
        error: OSError | None = None
        for key in keys:
            try:
                self._directory.record_path(key).unlink(missing_ok=True)
            except OSError as failure:
                left.add(key)
                error = failure.with_traceback(None)
        return frozenset(left), error

    def set_stamps(self, stamps: Sequence[tuple[ChunkKey, int]]) -> None:
        """Note when records were used. Best effort: it is only for the order after a restart."""
        for key, stamp in stamps:
            with contextlib.suppress(OSError):
                os.utime(self._directory.record_path(key), ns=(stamp, stamp))

    def _publish(self, job: WriteJob) -> None:
        path = self._directory.temporary_path(job.key)
        try:
            descriptor = self._create(path)
        except FileNotFoundError:  # the directory vanished
            self._directory.prepare()
            descriptor = self._create(path)
        try:
            try:
                _write_all(descriptor, job.view)
                os.utime(descriptor, ns=(job.stamp, job.stamp))
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._rename(path, job.key)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def _create(self, path: Path) -> int:
        return os.open(path, self._flags | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def _rename(self, path: Path, key: ChunkKey) -> None:
        record = self._directory.record_path(key)
        try:
            path.replace(record)
        except FileNotFoundError:
            self._directory.make_shard(key)
            path.replace(record)
        if self._fsync:
            descriptor = os.open(record.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _read(self, key: ChunkKey, view: memoryview) -> int:
        descriptor = os.open(self._directory.record_path(key), self._flags | os.O_RDONLY)
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes != len(view):
                raise _wrong_length(key, f"the file has {nbytes} bytes, not {len(view)}")
            nbytes = _read_all(descriptor, view)
            if nbytes != len(view):
                raise _wrong_length(key, f"the file gave {nbytes} bytes of {len(view)}")
        finally:
            os.close(descriptor)
        return _check_sizes(view)


def detect_direct(trial: Path, wanted: bool | Literal["auto"]) -> bool:
    """Whether to use direct I/O: what is wanted, or what a file of the name `trial` says.

    Raises:
        ConfigError: It is wanted and the file system refuses it.
        OSError: The trial failed for another reason.
    """
    if wanted is False:
        return False
    error = _try_direct(trial)
    if error is None:
        return True
    if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
        raise error
    if wanted is True:
        raise ConfigError(
            f"odirect is true, but the file system of {trial.parent} refuses direct I/O:"
            " set odirect to auto or false"
        ) from error
    return False


def _try_direct(path: Path) -> OSError | None:
    page = mmap.mmap(-1, PAGE)  # aligned
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error
    finally:
        page.close()
        path.unlink(missing_ok=True)
    return None


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        written = os.pwrite(descriptor, view[done:], done)
        whole = written // PAGE * PAGE  # after a short write direct I/O goes on from a page's start
        if whole == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += whole


def _read_all(descriptor: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], done)
        if count == 0:
            break
        done += count
        if done % PAGE:  # the end of a file that was cut
            break
    return done


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
