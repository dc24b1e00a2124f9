"""Keeps a copying thread off the core of the thread that waits for the copy."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def current_core() -> int | None:
    """The core that the calling thread runs on; None where nobody can tell."""
    try:
        core = int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):  # no Linux
        return None
    return core if core >= 0 else None


@contextlib.contextmanager
def off_core(core: int | None) -> Iterator[None]:
    """The calling thread runs on other cores than `core`, where it may use others.

    The kernel wakes a thread where it ran last, and with vLLM's processes polling on every other core it
    may leave it there for milliseconds, half of them the model's.
    """
    try:
        allowed = os.sched_getaffinity(0)
        others = allowed - {core}
        moved = core in allowed and bool(others)
        if moved:
            os.sched_setaffinity(0, others)
    except (AttributeError, OSError):  # no Linux, or forbidden
        moved, allowed, others = False, set(), set()
    try:
        yield
    finally:
        if moved:
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(0) == others:  # else somebody else has moved it meanwhile
                    os.sched_setaffinity(0, allowed)
