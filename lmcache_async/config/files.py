"""Small files from outside: regular ones alone, never more than a bound, never a wait."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lmcache_async.errors import ConfigError

MAX_SECRET_BYTES = 64 << 10


def read_bounded(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """The content and the mode.

    Raises:
        OSError: It cannot be read, is no regular file or longer than `max_bytes`; `strerror` says why.
    """
    if "\0" in str(path):
        raise OSError(0, "no file has a null character in its name")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for ever
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is no regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"it has more than {max_bytes} bytes")
    return content, stat.S_IMODE(mode)


def read_secret_file(path: Path, name: str) -> bytes:
    """The content of a file that is closed to others.

    Raises:
        ConfigError: It cannot be read, or everybody may read it. `name` is the option that names it.
    """
    try:
        content, mode = read_bounded(path, MAX_SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None
    if mode & 0o007:
        raise ConfigError(
            f"{name}: {path} has mode {mode:04o}, so everybody may read it:"
            " chmod 600 it (in Kubernetes set the secret's defaultMode to 0400)"
        )
    return content
