"""The directory of a disk tier: names, lock, direct I/O support. Blocking; run in threads.

    <root>/lock                     held by the owner; contains its process id
    <root>/ab/ab12...               one record each, named by its key in hex
    <root>/tmp/ab12....7            records being written
    <root>/quarantine/ab12....why   corrupt records, if they are kept

Files with other names are neither counted nor deleted.

Everything below the root is reached from its descriptor. If the path is replaced while the directory is open,
files are still read and written in the directory that is locked, never in one that may belong to another
process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lmcache_async.errors import ConfigError, TierInUseError, TierUnavailableError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.tiers.offline import StoredRecord
from lmcache_async.types import KEY_BYTES, ChunkKey

logger = logging.getLogger(__name__)

TEMPORARY_FOLDER = "tmp"
TEMPORARY_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[0-9]+")
QUARANTINE_FOLDER = "quarantine"
QUARANTINE_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[a-z]+")
_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_LOCK = "lock"
USED_NAME = re.compile(rf"{_LOCK}|{TEMPORARY_FOLDER}|{_SHARD.pattern}")
"""Names in the root that the tier must be able to read and write."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK_ATTEMPTS = 20
_LOCK_PAUSE_S = 0.01
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_CANNOT_LOCK_DIRECTORIES = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP})


class RecordDirectory:
    """The directory of records that one process owns.

    A forked child does not own it: its threads do not exist there, and its copies of the descriptors are
    closed, so that they do not hold the lock after the owner has ended.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fd = -1  # of the root; the number stays the same when `prepare` opens another directory
        self._lock = -1
        self._preparing = threading.Lock()
        self._numbers = itertools.count()

    @property
    def fd(self) -> int:
        """Descriptor of the root."""
        if self._fd < 0:
            raise TierUnavailableError(f"{self.root} is not open in process {os.getpid()}")
        return self._fd

    def record_name(self, key: ChunkKey) -> str:
        """Path of the record relative to the root: hex digits only, so no key leads to another directory."""
        name = _hex(key)
        return f"{name[:2]}/{name}"

    def temporary_name(self, key: ChunkKey) -> str:
        return f"{TEMPORARY_FOLDER}/{_hex(key)}.{next(self._numbers)}"

    def open(self) -> list[StoredRecord]:
        """Lock the directory, delete temporary files of ended writers, and list the records.

        Raises:
            TierUnavailableError: Another process has locked it.
        """
        self.prepare()
        close = weakref.WeakMethod(self._close_in_child)  # weak, because the callback is never removed
        os.register_at_fork(after_in_child=lambda: (method := close()) and method())
        for name, _ in list(self.list_files(TEMPORARY_FOLDER, TEMPORARY_NAME)):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                os.unlink(f"{TEMPORARY_FOLDER}/{name}", dir_fd=self.fd)
        return list(self.scan())

    def open_shared(self) -> None:
        """Open the directory for reading, while another process may own it. Nothing is created."""
        self._fd = os.open(self.root, _DIRECTORY)

    def used_by_tier(self) -> bool:
        """Whether a tier has prepared the open directory, or it has a record."""
        with contextlib.suppress(OSError):
            os.stat(_LOCK, dir_fd=self.fd, follow_symlinks=False)
            with self.folder(TEMPORARY_FOLDER):
                return True
        return next(self.scan(), None) is not None

    def prepare(self) -> None:
        """Create missing directories and lock the root. Called again if the root was deleted while open."""
        with self._preparing:  # two threads may find it missing at the same time
            _make_private(self.root)
            descriptor = os.open(self.root, _DIRECTORY)
            try:
                if self._fd < 0 or not os.path.samestat(os.fstat(descriptor), os.fstat(self._fd)):
                    self._lock_root(descriptor)
            finally:
                if descriptor != self._fd:
                    os.close(descriptor)
            with contextlib.suppress(FileExistsError):
                os.mkdir(TEMPORARY_FOLDER, 0o700, dir_fd=self._fd)
            with self.folder(TEMPORARY_FOLDER):
                pass  # it is a directory, not a link to one

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[int]:
        """Descriptor of a directory in the root. Links are not followed."""
        descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd)
        try:
            yield descriptor
        finally:
            with contextlib.suppress(
                OSError
            ):  # nothing was written; what was done in the folder has succeeded
                os.close(descriptor)

    @contextlib.contextmanager
    def folder_of(self, key: ChunkKey) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory of a record, and the record's name in it. Links are not followed."""
        name = _hex(key)
        with self.folder(name[:2]) as descriptor:
            yield descriptor, name

    def list_files(self, folder: str, names: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the regular files with matching names in a directory of the root."""
        with self.folder(folder) as descriptor, os.scandir(descriptor) as entries:
            for entry in entries:
                if names.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield entry.name, status

    def scan(self) -> Iterator[StoredRecord]:
        """Yield the record files. Their time of use is their mtime."""
        with os.scandir(self.fd) as entries:
            shards = [e.name for e in entries if _SHARD.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        for shard in shards:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                for name, status in self.list_files(shard, _RECORD):
                    if name.startswith(shard):
                        yield StoredRecord(ChunkKey(bytes.fromhex(name)), status.st_size, status.st_mtime_ns)

    def close(self) -> None:
        """Release the locks, even if a forked child has copies of the descriptors, and close the directory."""
        for descriptor in (self._lock, self._fd):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                with contextlib.suppress(OSError):  # only the process id was written to them
                    os.close(descriptor)
        self._fd = self._lock = -1

    def _close_in_child(self) -> None:
        """Close the descriptors of a forked child. The parent keeps its locks."""
        if self._fd >= 0:
            os.close(self._lock)
            os.close(self._fd)
            self._fd = self._lock = -1

    def _empty(self, descriptor: int) -> None:
        """Delete the files of an earlier owner in the directory that replaces the open one. The index does not have them."""
        other = RecordDirectory(self.root)
        other._fd = descriptor
        names = [other.record_name(record.key) for record in other.scan()]
        with contextlib.suppress(FileNotFoundError):
            unfinished = other.list_files(TEMPORARY_FOLDER, TEMPORARY_NAME)
            names += [f"{TEMPORARY_FOLDER}/{name}" for name, _ in unfinished]
        for name in names:
            os.unlink(name, dir_fd=descriptor)
        if names:
            logger.warning(
                "%s was deleted and replaced while it was open: %d files in the new directory were deleted",
                self.root,
                len(names),
            )

    def _lock_root(self, descriptor: int) -> None:
        lock = _lock_directory(descriptor, self.root)
        if self._fd < 0:
            self._fd, self._lock = descriptor, lock
            return
        try:
            self._empty(descriptor)
        except BaseException:
            os.close(lock)
            raise
        # Other threads may be about to use the descriptors: keep the numbers, replace the files behind them.
        os.dup2(descriptor, self._fd, inheritable=False)
        os.dup2(lock, self._lock, inheritable=False)
        os.close(lock)


def lock_holder(directory: int) -> str:
    """Return the id of the process that has locked the directory, or "" if no process is found.

    The lock itself is not tried, because an engine that starts at that moment would be refused.
    """
    try:
        descriptor = os.open(
            _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory
        )
    except OSError:  # never locked
        return ""
    try:
        holder, inode = _read_holder(descriptor), os.fstat(descriptor).st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    # "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; some file systems report another device
    held = {(words[4], words[5].rpartition(":")[2]) for line in locks if len(words := line.split()) > 5}
    return holder if (holder, str(inode)) in held else ""


def detect_direct(directory: RecordDirectory, wanted: bool | Literal["auto"]) -> bool:
    """Return whether to use direct I/O: the option, or for `auto` the result of a trial.

    Raises:
        ConfigError: Direct I/O is required and the file system refuses it.
    """
    if wanted is False:
        return False
    try:
        try:
            _try_direct_writes(directory.fd)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            _try_direct(directory.fd, _LOCK, os.O_RDONLY)  # a full file system can still be read
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        if wanted is True:
            raise ConfigError(
                f"odirect is true, but the file system of {directory.root} refuses direct I/O:"
                " set odirect to auto or false"
            ) from error
        return False
    return True


def _try_direct_writes(directory: int) -> None:
    """Write and read a file by direct I/O, and delete it."""
    name = f"{TEMPORARY_FOLDER}/{secrets.token_hex(KEY_BYTES)}.0"
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    # Without O_DIRECT: some file systems create the file before they refuse it.
    os.close(os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory))
    try:
        _try_direct(directory, name, os.O_RDWR)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def _try_direct(directory: int, name: str, access: int) -> None:
    """Read the first page of a file by direct I/O. If `access` is O_RDWR, write this page first."""
    flags = access | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        with contextlib.closing(mmap.mmap(-1, PAGE)) as page:  # aligned
            if access == os.O_RDWR:
                os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
    finally:
        os.close(descriptor)


def _lock_directory(directory: int, path: Path) -> int:
    """Lock the directory and its file `lock`, write the process id to it, and return its descriptor.

    The lock is on the inode, not on a name: symbolic links and other mounts of the directory lead to the same
    lock, and deleting the file does not release it. The file holds the process id, and is the lock on file
    systems that cannot lock directories.

    Raises:
        TierInUseError: Another process has locked it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(_LOCK, flags, 0o600, dir_fd=directory)
    try:
        try:
            _lock_file(directory)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK_DIRECTORIES:
                raise
        _lock_file(descriptor)
        _write_holder(descriptor)
    except BlockingIOError as error:
        holder = _read_holder(descriptor)
        os.close(descriptor)
        this = " (this one)" if holder == str(os.getpid()) else ""
        raise TierInUseError(
            f"{path} is in use by process {holder}{this}: give each tier a separate path or subdirectory"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock_file(descriptor: int) -> None:
    """Lock a file or a directory. Wait for the end of a shared lock, which `lmcache-async doctor` holds for a moment.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == _LOCK_ATTEMPTS - 1:
                raise
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises if it is not only shared
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _write_holder(descriptor: int) -> None:
    """Write the process id, which is only for messages: on a full file system the file stays empty."""
    text = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(descriptor, text, 0)  # over that of an earlier owner, which needs no room
        os.ftruncate(descriptor, len(text))
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        os.ftruncate(descriptor, 0)


def _read_holder(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
    return text if text.isdigit() else "unknown"


def _hex(key: ChunkKey) -> str:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}: {key!r}")
    return key.hex()


def _make_private(path: Path) -> None:
    """Create the directory and its missing parents with mode 0700."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
