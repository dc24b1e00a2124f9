"""Copies in host memory that release the GIL, by the compiled module if installed, else by NumPy."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from lmcache_async.memory.buffer import Bytes

INTERFACE = 3
"""Interface version of `_rows.c`. A module that was built from an older version is not used."""

compiled: ModuleType | None
try:
    from lmcache_async.memory import _rows

    compiled = _rows if getattr(_rows, "INTERFACE", 0) == INTERFACE else None
except ImportError:  # installed where there was no C compiler
    compiled = None

STREAM_BYTES = 4 << 20
"""Minimum bytes of a batch that may bypass the CPU caches. Smaller batches fit into the caches."""

_START = np.zeros(1, np.int64)


class FasterWay:
    """Decides by measurement whether copies bypass the CPU caches. The faster way depends on the machine.

    Each way is tried `TRIALS` times. After that the faster one is chosen, except that every `AGAIN`th batch is copied
    the other way, because the load of the machine changes.
    """

    TRIALS = 3
    AGAIN = 64

    def __init__(self) -> None:
        self._seconds_per_byte: dict[bool, float] = {}
        self._trials = {False: 0, True: 0}
        self._turns = 0

    def choose(self, nbytes: int) -> bool:
        """Return whether a batch of `nbytes` bytes bypasses the caches."""
        if compiled is None or nbytes < STREAM_BYTES:
            return False
        self._turns += 1
        for stream, trials in self._trials.items():
            if trials < self.TRIALS:
                return stream
        faster = min(self._seconds_per_byte, key=self._seconds_per_byte.__getitem__)
        return not faster if self._turns % self.AGAIN == 0 else faster

    def note(self, *, stream: bool, nbytes: int, seconds: float) -> None:
        """Record the CPU time of all threads for one batch."""
        if nbytes < STREAM_BYTES:
            return
        self._trials[stream] += 1
        known = self._seconds_per_byte.get(stream, seconds / nbytes)
        # The first access of memory is slower than later ones, so improvements have a higher weight.
        weight = 0.5 if seconds / nbytes < known else 0.1
        self._seconds_per_byte[stream] = known + weight * (seconds / nbytes - known)


def copy_bytes(target: Bytes, source: Bytes, *, stream: bool) -> None:
    """Copy all of `source` to `target`, which must have its length and not overlap it.

    Args:
        stream: Bypass the CPU caches, if the compiled module is installed.

    Raises:
        ValueError: The lengths differ.
    """
    if len(target) != len(source):
        raise ValueError(f"cannot copy {len(source)} bytes to {len(target)} bytes: the lengths differ")
    if compiled is None:
        np.copyto(target, source)
    elif len(target):
        compiled.copy(source, _START, target, len(target), True, stream)
