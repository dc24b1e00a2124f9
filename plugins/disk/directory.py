"""The directory of records: names, the lock, what is found at the start. Blocking; run in threads.

    <root>/lock                    held by the owner; has its process id
    <root>/ab/ab12...              one record each, named by its key in hex
    <root>/tmp/ab12....7           records being written

Files of other names are nobody's business of ours: they are neither counted nor deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import threading
from typing import TYPE_CHECKING, NamedTuple

from lmcache_async.errors import TierUnavailableError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_TEMPORARY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[0-9]+")


class Found(NamedTuple):
    """A record file as it lies there; of a hundred thousand, so it is a tuple.

    Attributes:
        nbytes: Its size.
        stamp: When it was last used, in ns since the epoch: its mtime.
    """

    key: ChunkKey
    nbytes: int
    stamp: int

    @property
    def whole_pages(self) -> bool:
        """What every record is; a file system that lost power may have left something else."""
        return self.nbytes > 0 and self.nbytes % PAGE == 0


class RecordDirectory:
    """One process's directory of records."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = -1
        self._preparing = threading.Lock()
        self._numbers = itertools.count()

    def record_path(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self.root / name[:2] / name

    def temporary_path(self, key: ChunkKey) -> Path:
        return self.root / "tmp" / f"{key.hex()}.{next(self._numbers)}"

    def open(self) -> list[Found]:
        """Take the directory, sweep what dead writers left, and list its records.

        Raises:
            TierUnavailableError: Another process has it.
            OSError: It cannot be made or read.
        """
        self.prepare()
        for entry in _entries(self.root / "tmp", _TEMPORARY):
            os.unlink(entry.path)  # noqa: PTH108 - there is no Path yet
        return list(self._scan())

    def prepare(self) -> None:
        """Make what is missing and hold the lock; also when the directory vanished meanwhile."""
        with self._preparing:  # two threads may miss it at once, and a lock file is ours or another's
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            self._take_lock()
            (self.root / "tmp").mkdir(mode=0o700, exist_ok=True)

    def make_shard(self, key: ChunkKey) -> None:
        self.record_path(key).parent.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Leave the directory to others."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        path = self.root / "lock"
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(self._lock)):
                    return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise TierUnavailableError(
                f"{self.root} is in use by process {holder}:"
                " give each process a path or a subdirectory of its own"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._lock = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _scan(self) -> Iterator[Found]:
        for shard in _entries(self.root, _SHARD, stat.S_IFDIR):
            for entry in _entries(shard.path, _RECORD):
                if not entry.name.startswith(shard.name):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield Found(ChunkKey(bytes.fromhex(entry.name)), status.st_size, status.st_mtime_ns)


def _entries(
    path: Path | str, names: re.Pattern[str], kind: int = stat.S_IFREG
) -> Iterator[os.DirEntry[str]]:
    """Those of our names that are a file (or, by `kind`, a directory); links are foreign."""
    with os.scandir(path) as entries:
        for entry in entries:
            if names.fullmatch(entry.name) is None:
                continue
            of_kind = entry.is_dir if kind == stat.S_IFDIR else entry.is_file
            if of_kind(follow_symlinks=False):
                yield entry
