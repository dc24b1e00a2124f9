"""Whether a file system takes direct I/O. Blocking; run in threads."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Literal

from lmcache_async.errors import ConfigError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.types import KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from lmcache_async.plugins.disk.directory import RecordDirectory

_TRIAL = ChunkKey(bytes(KEY_BYTES))
_NAMES = 100


def detect_direct(directory: RecordDirectory, wanted: bool | Literal["auto"]) -> bool:
    """Whether to use direct I/O: what is wanted, or what a file in the directory says.

    Raises:
        ConfigError: It is wanted and the file system refuses it.
        OSError: The trial failed for another reason.
    """
    if wanted is False:
        return False
    error = _try_direct(directory)
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


def _try_direct(directory: RecordDirectory) -> OSError | None:
    """What a file that is written and read directly says: nothing is wrong, or this."""
    error: OSError | None = None
    for _ in range(_NAMES):
        name = directory.temporary_name(_TRIAL)
        error = _try_file(name, directory.fd)
        if not isinstance(error, FileExistsError):
            break  # else somebody's thing, which stays
    return error


def _try_file(name: str, root: int) -> OSError | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        os.close(os.open(name, flags, 0o600, dir_fd=root))  # some make it before they refuse O_DIRECT
    except OSError as error:
        return error
    try:
        _write_and_read(name, root)
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=root)
    return None


def _write_and_read(name: str, root: int) -> None:
    page = mmap.mmap(-1, PAGE)  # aligned
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW, dir_fd=root)
        try:
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    finally:
        page.close()
