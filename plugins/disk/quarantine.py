"""Where broken records are kept for somebody to look at. Blocking; run in threads."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from typing import TYPE_CHECKING

from lmcache_async.types import KEY_BYTES

if TYPE_CHECKING:
    from lmcache_async.plugins.disk.directory import RecordDirectory
    from lmcache_async.types import ChunkKey

FOLDER = "quarantine"
KEPT = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[a-z]+")


class Quarantine:
    """A folder beside the records, bounded in bytes: the oldest in it make room for the newest.

    Args:
        directory: The tier's.
        max_bytes: Most bytes of what is kept; they do not count against the tier's own limit.
    """

    def __init__(self, directory: RecordDirectory, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def take(self, key: ChunkKey, cause: str) -> None:
        """Move the record here, named by its key and the cause.

        Raises:
            OSError: It is not there, or cannot be moved.
        """
        word = "".join(letter for letter in cause.lower() if "a" <= letter <= "z") or "unknown"
        root = self._directory.fd
        name = self._directory.record_name(key)
        if not stat.S_ISREG(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no record file, but something else", name)
        with self._lock:
            with contextlib.suppress(FileExistsError):
                os.mkdir(FOLDER, 0o700, dir_fd=root)
            with self._directory.directory(FOLDER) as folder:
                os.rename(name, f"{key.hex()}.{word}", src_dir_fd=root, dst_dir_fd=folder)
            with contextlib.suppress(OSError):
                self._trim()

    def trim(self) -> None:
        """Delete the oldest until the limit is kept."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            self._trim()

    def _trim(self) -> None:
        with self._directory.directory(FOLDER) as folder:
            kept = []
            for name in self._directory.list_files(FOLDER, KEPT):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    kept.append((status.st_ctime_ns, name, status.st_size))
            excess = sum(nbytes for _, _, nbytes in kept) - self._max_bytes
            for _, name, nbytes in sorted(kept):
                if excess <= 0:
                    break
                os.unlink(name, dir_fd=folder)
                excess -= nbytes
