"""The end of a simulated process that nobody prepared for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from lmcache_async.testing.simulation.loop import SimulatedLoop

_MOST_AWAITS = 100  # in the `finally` blocks of one coroutine


def abandon(loop: SimulatedLoop) -> None:
    """Drop everything that still ran on the loop, whatever it waited for.

    A real process would just be gone. Here coroutines have to be closed, which runs their `finally`
    blocks: the loop is closed before, so that they reach nothing that outlives the process. What threads
    had still to do is not done; a thread begun in a `finally` block runs at once.
    """
    tasks = loop.live_tasks()
    loop.close()
    loop.threads.drop()
    asyncio._set_running_loop(loop)
    with _unheard(), patch.object(threading.Thread, "start", threading.Thread.run):
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
        tasks.clear()
        gc.collect()
    asyncio._set_running_loop(None)


def _close(coroutine: Any) -> None:
    for _ in range(_MOST_AWAITS):  # one that awaits in a `finally` is still there after the first
        with contextlib.suppress(BaseException):
            coroutine.close()
            return


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What the dying say: coroutines that were never awaited, or that await in a `finally`."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
