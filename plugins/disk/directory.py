"""The directory of records: names, the owner's hold, what is found at the start. Blocking; run in threads.

    <root>/lock                    held by the owner; has its process id
    <root>/ab/ab12...              one record each, named by its key in hex
    <root>/tmp/ab12....7           records being written
    <root>/quarantine/ab12....why  records found broken, where they are kept

Files of other names are nobody's business of ours: they are neither counted nor deleted.

All but the root is reached from its descriptor. Where the path leads to something else meanwhile, what
we do stays in the directory that we hold, and never goes to one that may be another process's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from lmcache_async.errors import TierUnavailableError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.plugins.disk.lock import release_locks, take_lock
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SHARD = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
TEMPORARY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[0-9]+")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
    """One process's directory of records.

    A forked child has no hold: its threads do not exist, and its copies of the descriptors are closed,
    so that they keep nobody out once the owner is gone.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fd = -1  # of the root; the number stays, what it leads to is exchanged by `prepare`
        self._lock = -1
        self._preparing = threading.Lock()
        self._numbers = itertools.count()

    @property
    def fd(self) -> int:
        """To reach names from.

        Raises:
            TierUnavailableError: The directory is not held; also in a forked child.
        """
        if self._fd < 0:
            raise TierUnavailableError(f"{self.root} is not held by process {os.getpid()}")
        return self._fd

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def status(self) -> os.stat_result:
        """Of the root."""
        return os.fstat(self.fd)

    def record_name(self, key: ChunkKey) -> str:
        """From the root: 16 bytes in hex, so no key leads anywhere else."""
        name = _hex(key)
        return f"{name[:2]}/{name}"

    def record_path(self, key: ChunkKey) -> Path:
        """For messages."""
        return self.root / self.record_name(key)

    def temporary_name(self, key: ChunkKey) -> str:
        return f"tmp/{_hex(key)}.{next(self._numbers)}"

    def open(self) -> list[Found]:
        """Take the directory, sweep what dead writers left, and list its records.

        Raises:
            TierUnavailableError: Another process has it.
            OSError: It cannot be made or read.
        """
        self.prepare()
        _forget_in_children(self)
        for name in self.list_files("tmp", TEMPORARY):
            os.unlink(f"tmp/{name}", dir_fd=self.fd)
        return list(self.scan())

    def look(self) -> None:
        """Open to read, beside whoever holds the directory; nothing is made.

        Raises:
            OSError: It is not there, or cannot be read.
        """
        self._fd = os.open(self.root, _DIRECTORY)

    def prepare(self) -> None:
        """Make what is missing and hold the directory; also when it vanished meanwhile."""
        with self._preparing:  # two threads may miss it at once, and a lock is ours or another's
            _make_private(self.root)
            descriptor = os.open(self.root, _DIRECTORY)
            try:
                if self._fd < 0 or not os.path.samestat(os.fstat(descriptor), os.fstat(self._fd)):
                    self._hold(descriptor)
            finally:
                if descriptor != self._fd:
                    os.close(descriptor)
            with contextlib.suppress(FileExistsError):
                os.mkdir("tmp", 0o700, dir_fd=self._fd)
            with self.directory("tmp"):
                pass  # it is one, and no link to one

    @contextlib.contextmanager
    def directory(self, name: str) -> Iterator[int]:
        """The descriptor of a directory in the root; a link is not followed."""
        descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def list_files(self, name: str, names: re.Pattern[str]) -> list[str]:
        """The regular files of such names in a directory of the root."""
        with self.directory(name) as descriptor, os.scandir(descriptor) as entries:
            return [
                entry.name
                for entry in entries
                if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]

    def close(self) -> None:
        """Leave the directory to others."""
        if self._fd >= 0:
            release_locks(*(descriptor for descriptor in (self._lock, self._fd) if descriptor >= 0))
            self._fd = self._lock = -1

    def forget(self) -> None:
        """In a forked child: let go of it without taking it from the parent."""
        if self._fd >= 0:
            os.close(self._lock)
            os.close(self._fd)
            self._fd = self._lock = -1

    def _hold(self, descriptor: int) -> None:
        lock = take_lock(descriptor, self.root)
        if self._fd < 0:
            self._fd, self._lock = descriptor, lock
            return
        # Threads may be about to use the numbers: these stay, and what they stood for is let go.
        os.dup2(descriptor, self._fd, inheritable=False)
        os.dup2(lock, self._lock, inheritable=False)
        os.close(lock)

    def scan(self) -> Iterator[Found]:
        with os.scandir(self.fd) as entries:
            shards = [e.name for e in entries if _SHARD.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        for shard in shards:
            with self.directory(shard) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    if not (_RECORD.fullmatch(entry.name) and entry.name.startswith(shard)):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        key = ChunkKey(bytes.fromhex(entry.name))
                        yield Found(key, status.st_size, status.st_mtime_ns)


def _hex(key: ChunkKey) -> str:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}: {key!r}")
    return key.hex()


def _make_private(path: Path) -> None:
    """Make the directory and those above it that are missing, for the owner alone."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)


def _forget_in_children(directory: RecordDirectory) -> None:
    """The interpreter keeps such a callback for ever, so it keeps the directory alive by no means."""
    reference = weakref.ref(directory)

    def forget() -> None:
        if (held := reference()) is not None:
            held.forget()

    os.register_at_fork(after_in_child=forget)
