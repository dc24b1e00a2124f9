"""CPU affinity of copy threads, off the core of the thread that waits for the copy."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def current_core() -> int | None:
    """Return the core that the calling thread runs on; None if it cannot be determined."""
    try:
        core = int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):  # not Linux
        return None
    return core if core >= 0 else None


@contextlib.contextmanager
def off_core(core: int | None) -> Iterator[None]:
    """Exclude `core` from the affinity of the calling thread in the block, if other cores are allowed.

    The kernel wakes a thread on the core where it ran last. If vLLM's processes poll on every other core, the
    thread may stay there for milliseconds and take half of the time of the model thread.
    """
    try:
        allowed = os.sched_getaffinity(0)
        others = allowed - {core}
        moved = core in allowed and bool(others)
        if moved:
            os.sched_setaffinity(0, others)
    except (AttributeError, OSError):  # not Linux, or not permitted
        moved, allowed, others = False, set(), set()
    try:
        yield
    finally:
        if moved:
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(0) == others:  # else other code has changed it meanwhile
                    os.sched_setaffinity(0, allowed)
