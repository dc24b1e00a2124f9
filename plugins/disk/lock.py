"""One owner for a directory: locks that end with the process, whatever ends it. Blocking; run in threads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from lmcache_async.errors import TierInUseError

_CANNOT_LOCK_DIRECTORIES = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP})


def take_lock(directory: int, path: Path) -> int:
    """Lock the directory, and the file `lock` in it; the descriptor of that file, with our process id.

    The lock is on what is there and not on a name, so symbolic links and further mounts of a directory
    lead to the same lock, and deleting the file gives nothing away. The file is for its text, and for
    file systems that cannot lock directories.

    Args:
        directory: Descriptor of the directory; holds the lock until it is closed.
        path: For messages.

    Raises:
        TierInUseError: Somebody else has the directory.
        OSError: The file cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open("lock", flags, 0o600, dir_fd=directory)
    try:
        try:
            _lock(directory)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK_DIRECTORIES:
                raise
        _lock(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise TierInUseError(
            f"{path} is in use by process {holder}: give each process a path or a subdirectory of its own"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def release_locks(*descriptors: int) -> None:
    """Give the locks back now, also those that a forked child has copies of, and close."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def holder_of(directory: int) -> str:
    """The process that has the directory, by its id, as far as can be seen from here; "" for nobody.

    No lock is tried for it: an engine that starts at that moment would be refused.
    """
    try:
        descriptor = os.open(
            "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory
        )
    except OSError:  # never owned
        return ""
    try:
        holder, inode = _holder(descriptor), os.fstat(descriptor).st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    # "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF"; the device is another one on some file systems
    held = {(words[4], words[5].rpartition(":")[2]) for line in locks if len(words := line.split()) > 5}
    return holder if (holder, str(inode)) in held else ""


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
    return text if text.isdigit() else "unknown"
