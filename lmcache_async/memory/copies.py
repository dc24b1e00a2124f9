"""Copies in host memory that release the GIL, by the compiled module if installed, else by NumPy; and threads for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lmcache_async.errors import EngineClosedError
from lmcache_async.memory.buffer import Bytes
from lmcache_async.memory.threads import ThreadStartError, run_shielded

INTERFACE = 6
"""Interface version of `_rows.c`. A module that was built from an older version is not used."""

installed: ModuleType | None = None
try:
    from lmcache_async.memory import _rows
except ImportError:  # installed where there was no C compiler
    pass
else:
    installed = _rows
compiled = installed if getattr(installed, "INTERFACE", 0) == INTERFACE else None

STREAM_BYTES = 4 << 20
"""Minimum bytes of a batch that may bypass the CPU caches. Smaller batches fit into the caches."""

STREAM_PAGES: int = getattr(compiled, "STREAM_PAGES", 0)
"""Argument `stream` of the compiled module for copies that bypass the CPU caches. The best value depends on the processor."""

_START = np.zeros(1, np.int64)


class StreamingChoice:
    """Decides by measurement whether copies bypass the CPU caches. Which kind of copy is faster depends on the machine.

    Each kind of copy is tried `TRIALS` times. After that the faster one is chosen, except for one batch in
    `RETRIAL_INTERVAL`, because the load of the machine changes.
    """

    TRIALS = 3
    RETRIAL_INTERVAL = 64

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
        return not faster if self._turns % self.RETRIAL_INTERVAL == 0 else faster

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
        compiled.copy([(source, _START, target, len(target))], True, stream and STREAM_PAGES)


RowCopy: TypeAlias = "tuple[Bytes, npt.NDArray[np.int64], Bytes, int]"
"""Rows to copy: memory, byte offset of each row in it or -1 to skip the row, payload, and bytes of a row."""


class CopyQueue:
    """Threads that copy rows by the compiled module, which must be installed, and never take the GIL.

    A thread of a Python pool waits for the GIL before and after each copy, while the event loop plans the next one. Used
    on one event loop at a time. The threads are started by the first copy.

    Args:
        threads: Number of threads.
        name: Name of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        assert compiled is not None
        self._module = compiled
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queue = self._module.open_queue(self._event)
        self._name = name
        self._missing = threads
        self._process = os.getpid()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._copies: dict[int, asyncio.Future[None]] = {}
        # Let the threads end also if `close` is never called.
        weakref.finalize(self, self._module.close_queue, self._queue).atexit = False

    async def copy(self, copies: Sequence[RowCopy], *, to_payload: bool, stream: bool) -> None:
        """Make all copies, each of them in one thread.

        If the call is cancelled, copies that no thread has begun are withdrawn, and the others are awaited.

        Args:
            stream: Bypass the CPU caches.

        Raises:
            ValueError: The arguments of a copy do not fit together. Nothing is copied.
            ThreadStartError: No thread can be started.
            EngineClosedError: The queue is closed, or this process is a forked child.
        """
        if self._closed:
            raise EngineClosedError("the copier is closed")
        if self._process != os.getpid():
            raise EngineClosedError("the copier belongs to the parent of this forked process")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        if self._missing:
            self._start_threads()
        number = self._module.submit(self._queue, list(copies), to_payload, stream and STREAM_PAGES)
        copied = self._copies[number] = loop.create_future()
        await run_shielded(copied, on_cancel=partial(self._module.withdraw, self._queue, number))

    def close(self) -> None:
        """Wait for all copies and end the threads. Called on the thread of the event loop, or after its end. Idempotent.

        In a forked child it does nothing: the threads, and the event loop's file descriptors, are those of the parent.
        """
        if self._process != os.getpid():
            return
        self._closed = True
        self._move_to(None)
        self._module.close_queue(self._queue)
        for thread in self._threads:
            thread.join()
        self._notice()

    def _start_threads(self) -> None:
        while self._missing:
            thread = threading.Thread(
                target=self._module.run, args=(self._queue,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    break  # the others copy, and the next copy tries again
                raise ThreadStartError(str(error)) from error
            self._threads.append(thread)
            self._missing -= 1

    def _move_to(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Let this event loop notice the ends of copies."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._event)
        self._loop = loop
        if loop is not None:
            loop.add_reader(self._event, self._notice)

    def _notice(self) -> None:
        """Resolve the futures of the copies that have ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for number in self._module.finished(self._queue):
            copied = self._copies.pop(number)
            if not copied.done():
                with contextlib.suppress(RuntimeError):  # its event loop was closed
                    copied.set_result(None)
