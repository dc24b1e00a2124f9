"""The tier's directory without the tier: for tools, beside a running engine to read, alone to change. Blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.errors import TierUnavailableError
from lmcache_async.plugins.disk.directory import TEMPORARY, RecordDirectory
from lmcache_async.plugins.disk.io import RecordFiles, WriteJob
from lmcache_async.plugins.disk.lock import holder_of
from lmcache_async.plugins.disk.quarantine import FOLDER, KEPT, Quarantine
from lmcache_async.plugins.disk.reading import read_all
from lmcache_async.tiers.rest import AtRest, Kept, Litter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.plugins.disk.config import DiskConfig
    from lmcache_async.types import ChunkKey

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
_UNBOUNDED = 1 << 62  # the engine trims the quarantine to its own limit when it opens the tier


class DiskAtRest(AtRest):
    """The records of one directory of the disk tier.

    A record's file is written under a temporary name and renamed when it is whole, and never written to
    again: who opens it has all of it, though it be evicted meanwhile.
    """

    def __init__(self, config: DiskConfig) -> None:
        self.place = config.root
        self._directory = RecordDirectory(config.root)
        self._files: RecordFiles | None = None
        self._changed: set[str] = set()  # folders with names that are not durable yet
        self._quarantine = Quarantine(self._directory, _UNBOUNDED)

    def look(self) -> None:
        try:
            self._directory.look()
        except FileNotFoundError as error:
            raise TierUnavailableError(
                f"there is no directory {self.place}: name the `path` of a disk tier, with its rank-<n>"
                " where there are several ranks"
            ) from error
        except OSError as error:
            raise TierUnavailableError(f"cannot read {self.place}: {error.strerror}") from error

    def hold(self) -> None:
        try:
            self._directory.prepare()
        except OSError as error:
            raise TierUnavailableError(f"cannot open {self.place}: {error.strerror}") from error
        # Through the page cache: there is no trial for direct I/O to leave behind, and the data are synced.
        self._files = RecordFiles(self._directory, direct=False, fsync=True, quarantine=self._quarantine)

    def close(self) -> None:
        self._directory.close()

    @property
    def holder(self) -> str:
        return holder_of(self._directory.fd) if self._files is None else ""

    def list(self) -> Sequence[Kept]:
        return [Kept(found.key, found.nbytes, found.stamp) for found in self._directory.scan()]

    def read(self, key: ChunkKey, view: memoryview, offset: int = 0) -> int | None:
        try:
            descriptor = self._open(key)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return 0
            return read_all(descriptor, view, offset)
        finally:
            os.close(descriptor)

    def write(self, key: ChunkKey, view: memoryview, stamp: int) -> None:
        assert self._files is not None, "written to without a hold"
        error = self._files.write(WriteJob(key, view, stamp))
        if isinstance(error, OSError):
            raise error
        if error is not None:
            raise OSError(errno.EINVAL, str(error))

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            name = self._directory.record_name(key)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(name, dir_fd=self._directory.fd)
                self._changed.add(str(Path(name).parent))

    def set_aside(self, key: ChunkKey, cause: str) -> None:
        self._quarantine.take(key, cause)
        self._changed |= {str(Path(self._directory.record_name(key)).parent), FOLDER}

    def litter(self) -> tuple[Sequence[Litter], Sequence[Litter]]:
        return self._files_in("tmp", TEMPORARY), self._files_in(FOLDER, KEPT)

    def sweep(self, litter: Sequence[Litter]) -> None:
        for each in litter:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each.name, dir_fd=self._directory.fd)
                self._changed.add(str(Path(each.name).parent))

    def sync(self) -> None:
        """Names; a record's bytes were synced before it got its name."""
        for folder in sorted(self._changed):
            with self._directory.directory(folder) as descriptor:
                os.fsync(descriptor)
        self._changed.clear()
        os.fsync(self._directory.fd)

    def _open(self, key: ChunkKey) -> int:
        name, flags = self._directory.record_name(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(name, flags | os.O_NONBLOCK | os.O_DIRECT, dir_fd=self._directory.fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=self._directory.fd)

    def _files_in(self, folder: str, names: re.Pattern[str]) -> Sequence[Litter]:
        try:
            found = self._directory.list_files(folder, names)
            with self._directory.directory(folder) as descriptor:
                return [Litter(f"{folder}/{name}", _size(name, descriptor)) for name in found]
        except FileNotFoundError:
            return []


def _size(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:  # published, or deleted by its owner
        return 0
