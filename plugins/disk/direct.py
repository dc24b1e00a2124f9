"""Whether a file system takes direct I/O. Blocking; run in threads."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Literal

from lmcache_async.errors import ConfigError
from lmcache_async.memory.buffer import PAGE

if TYPE_CHECKING:
    from lmcache_async.plugins.disk.directory import RecordDirectory


def detect_direct(directory: RecordDirectory, trial: str, wanted: bool | Literal["auto"]) -> bool:
    """Whether to use direct I/O: what is wanted, or what a file of the name `trial` says.

    Raises:
        ConfigError: It is wanted and the file system refuses it.
        OSError: The trial failed for another reason.
    """
    if wanted is False:
        return False
    error = _try_direct(trial, directory.fd)
    if error is None:
        return True
    if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
        raise error
    if wanted is True:
        raise ConfigError(
            f"odirect is true, but the file system of {directory.root} refuses direct I/O:"
            " set odirect to auto or false"
        ) from error
    return False


def _try_direct(name: str, root: int) -> OSError | None:
    page = mmap.mmap(-1, PAGE)  # aligned
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW
        descriptor = os.open(name, flags, 0o600, dir_fd=root)
        try:
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error
    finally:
        page.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=root)
    return None
