"""The files of a disk tier: listing, removal from the page cache, and raw reads."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from tools.benchmarks.serve_engine import ServeError

THREADS = 4  # concurrent reads of the disk tier
STILL_S, LONGEST_S = 0.5, 60.0


def sizes(directory: Path) -> dict[Path, int]:
    """Return every file under the directory with its size in bytes."""
    found = {}
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            if path.is_file():
                found[path] = path.stat().st_size
    return found


def wait_still(directory: Path) -> None:
    """Wait until no file has changed for `STILL_S` seconds.

    Raises:
        ServeError: The files still change after `LONGEST_S` seconds.
    """
    deadline = time.monotonic() + LONGEST_S
    before = sizes(directory)
    while time.monotonic() < deadline:
        time.sleep(STILL_S)
        after = sizes(directory)
        if after == before:
            return
        before = after
    raise ServeError(f"{directory} was still written to after {LONGEST_S:.0f} s")


def drop(paths: Iterable[Path]) -> None:
    """Write files back, because only clean pages can be dropped, and drop them from the page cache."""
    for path in paths:
        with _opened(path, os.O_RDONLY) as descriptor:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def direct(paths: Sequence[Path]) -> bool:
    """Return whether the files can be read with direct I/O."""
    try:
        with _opened(paths[0], os.O_RDONLY | os.O_DIRECT):
            return True
    except OSError:
        return False


class RawReads:
    """Reads whole files with `preadv` into memory touched before, with the concurrency of the disk tier."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._flags = os.O_RDONLY | (os.O_DIRECT if direct(paths) else 0)
        largest = max(path.stat().st_size for path in paths)
        self._memory = [mmap.mmap(-1, -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE) for _ in range(THREADS)]
        for memory in self._memory:
            memory.write(bytes(len(memory)))
        self._pool = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for memory in self._memory:
            memory.close()

    def milliseconds(self) -> float:
        """Drop all files from the page cache and read them. Return the milliseconds of the reads."""
        drop(self._paths)
        left = iter(self._paths)

        def thread(memory: mmap.mmap) -> None:
            for path in left:  # shared by all threads
                self._read(path, memory)

        start = time.perf_counter()
        list(self._pool.map(thread, self._memory))
        return 1e3 * (time.perf_counter() - start)

    def _read(self, path: Path, memory: mmap.mmap) -> None:
        with _opened(path, self._flags) as descriptor, memoryview(memory) as view:
            size = os.fstat(descriptor).st_size
            if os.preadv(descriptor, [view], 0) != size:
                raise OSError(f"{path}: a short read")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
