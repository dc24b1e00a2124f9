"""Copies in host memory without the interpreter's lock: by the compiled module, or else by NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    from lmcache_async.memory.buffer import Bytes

INTERFACE = 2
"""What `_rows.c` calls itself: one that was built from older source is not used."""

compiled: ModuleType | None
try:
    from lmcache_async.memory import _rows

    compiled = _rows if getattr(_rows, "INTERFACE", 0) == INTERFACE else None
except ImportError:  # installed where there was no C compiler
    compiled = None

STREAM_BYTES = 4 << 20
"""A batch from this size on is copied past the processor's caches, which hold little more."""

_START = np.zeros(1, np.int64)


class FasterWay:
    """Past the caches or through them: which is faster differs from machine to machine, so it is measured.

    Each way is tried `TRIALS` times; from then on the faster one is taken, and the other one every
    `AGAIN`th time, for what else runs on the machine changes.
    """

    TRIALS = 3
    AGAIN = 64

    def __init__(self) -> None:
        self._seconds_per_byte: dict[bool, float] = {}
        self._trials = {False: 0, True: 0}
        self._turns = 0

    def choose(self, nbytes: int) -> bool:
        """Whether a batch of so many bytes is copied past the caches."""
        if compiled is None or nbytes < STREAM_BYTES:
            return False
        self._turns += 1
        for stream, trials in self._trials.items():
            if trials < self.TRIALS:
                return stream
        faster = min(self._seconds_per_byte, key=self._seconds_per_byte.__getitem__)
        return not faster if self._turns % self.AGAIN == 0 else faster

    def note(self, *, stream: bool, nbytes: int, seconds: float) -> None:
        """A batch was copied in so many seconds of all threads' processor time."""
        if nbytes < STREAM_BYTES:
            return
        self._trials[stream] += 1
        known = self._seconds_per_byte.get(stream, seconds / nbytes)
        # The first touch of memory is slower than any later one: the better of two counts more.
        weight = 0.5 if seconds / nbytes < known else 0.1
        self._seconds_per_byte[stream] = known + weight * (seconds / nbytes - known)


def copy_bytes(target: Bytes, source: Bytes, *, stream: bool) -> None:
    """Copy all of `source` to `target`: of one length, and apart from each other.

    Args:
        stream: Past the caches, where there is the module.

    Raises:
        ValueError: Their lengths differ.
    """
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit into {len(target)}")
    if compiled is None:
        np.copyto(target, source)
    elif len(target):
        compiled.copy(source, _START, target, len(target), True, stream)
