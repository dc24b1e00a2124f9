"""Drop files from the page cache, so that reads come from the disk, and check the result."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop(directory: Path) -> int:
    """Write every file back, because only clean pages can be dropped, and drop its pages.

    Returns:
        Bytes that are still in the page cache: 0 on a file system on a disk, all bytes on tmpfs.
    """
    left = 0
    for path in _files(directory):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # evicted in the meantime
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left += _resident_bytes(descriptor)
        finally:
            os.close(descriptor)
    return left


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in _files(directory))


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def _resident_bytes(descriptor: int) -> int:
    length = os.fstat(descriptor).st_size
    if length == 0:
        return 0
    pages = -(-length // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)  # a private mapping: mincore reads nothing
        try:
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), resident):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del first
    return sum(page & 1 for page in resident) * mmap.PAGESIZE
