"""Layer-wise loads: the model thread uses the first layers while later ones are copied, and helps to copy them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple


class LoadProgress:
    """Progress of one load, set by the copier and awaited by the model thread.

    Planes are counted in payload order. A copy that has begun is always awaited to its end, because it writes
    to device memory. A copy that has not begun at the deadline is abandoned and must not begin.

    Create it on the thread that will wait; `core` is the core of that thread.
    """

    def __init__(self, num_planes: int) -> None:
        self.core = current_core()
        self._num_planes = num_planes
        self._changed = threading.Condition()
        self._planes = 0
        self._begun = False
        self.abandoned = False  # by the waiting thread; an abandoned load is never written
        self._ended = False
        self._worker: Callable[[int], object] | None = None

    def begin(self) -> bool:
        """Return whether the copier may write. If not, the load is abandoned."""
        with self._changed:
            self._begun = not self.abandoned
            self._changed.notify_all()  # the waiting thread then waits without a deadline
            return self._begun

    def advance(self, planes: int) -> None:
        """Report that the first `planes` planes of every row of the load are written."""
        with self._changed:
            self._planes = max(self._planes, planes)
            self._changed.notify_all()

    def set_worker(self, work: Callable[[int], object]) -> None:
        """Set the function that a thread calls while it waits: `work(n)` for the first n planes.

        `work(n)` copies the parts of the first n planes that no other thread has begun.
        """
        with self._changed:
            self._worker = work
            self._changed.notify_all()

    def end(self) -> None:
        """Report that the load writes no more, whether it succeeded or failed."""
        with self._changed:
            self._ended = True
            self._worker = None
            self._changed.notify_all()

    def wait(self, planes: int, *, deadline: float) -> None:
        """Block until the first `planes` planes are written, or the load has ended or is abandoned.

        A load that has not begun to write at `deadline`, of `time.monotonic()`, is abandoned.
        """
        planes = min(planes, self._num_planes)
        if self._settled(planes):  # without the lock: once true, it stays true
            return
        if (work := self._wait(planes, deadline, only_wait=False)) is not None:
            work(planes)
            self._wait(planes, deadline, only_wait=True)

    def _wait(self, planes: int, deadline: float, *, only_wait: bool) -> Callable[[int], object] | None:
        """Wait until `_settled`; unless `only_wait`, return the function of `set_worker` when it is set."""
        with self._changed:
            while not self._settled(planes):
                if self._worker is not None and not only_wait:
                    return self._worker
                left = None if self._begun else deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.abandoned = True
                else:
                    self._changed.wait(left)
        return None

    def wait_ended(self, *, deadline: float) -> bool:
        """Block until the load writes no more and its outcome is known. Return False if that is not so at `deadline`.

        In this case the load counts as failed: it was abandoned, or all planes are written and only its outcome is
        missing.
        """
        self.wait(self._num_planes, deadline=deadline)
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, max(0.0, deadline - time.monotonic()))

    def _settled(self, planes: int) -> bool:
        return self._planes >= planes or self._ended or self.abandoned


class CopyPart(NamedTuple):
    """Part of a copy. It writes to no plane before `first`."""

    first: int
    copy: Callable[[], object]


class PartQueue:
    """Thread-safe queue of the parts of one copy, in the order of their planes.

    Any number of threads call `work`. `advance` is called with the number of leading planes that are written, on the
    thread that wrote the last of them. `done` is resolved when no part is running or waiting. Then call `take_error`.
    """

    def __init__(self, parts: Iterable[CopyPart], planes: int, advance: Callable[[int], object]) -> None:
        self.done: Future[None] = Future()
        self._waiting = deque(parts)
        self._running: list[int] = []
        self._planes = planes
        self._advance = advance
        self._whole = True
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._end_if_idle()

    def work(self, planes: int | None = None) -> None:
        """Copy parts until none is left that writes to the first `planes` planes. Errors are kept for `take_error`.

        Raises:
            BaseException: Not an Exception: this thread was interrupted, for example by SystemExit in a signal handler.
        """
        while (part := self._take(planes)) is not None:
            first = part.first
            try:
                part.copy()
            except BaseException as error:
                with self._lock:
                    self._discard(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                del part  # drops the reference to the payload before `done` is resolved
                self._ended(first)

    def withdraw(self, error: BaseException | None = None) -> None:
        """Discard the parts that no thread has begun. If there are any, the copy fails with `error`."""
        with self._lock:
            if self._waiting:
                self._discard(error)
        self._end_if_idle()

    def take_error(self) -> BaseException | None:
        """Return the first error and drop it. Its frames refer to the queue, so the cycle would keep the payloads."""
        error, self._error = self._error, None
        return error

    def _discard(self, error: BaseException | None) -> None:
        self._error = self._error or error
        self._whole = False
        self._waiting.clear()

    def _take(self, planes: int | None) -> CopyPart | None:
        with self._lock:
            if not self._waiting or (planes is not None and self._waiting[0].first >= planes):
                return None
            part = self._waiting.popleft()
            self._running.append(part.first)
            return part

    def _ended(self, first: int) -> None:
        with self._lock:
            self._running.remove(first)
            if self._whole:
                following = [self._waiting[0].first] if self._waiting else []
                self._advance(min(self._running + following, default=self._planes))
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        with self._lock:
            if not (self._waiting or self._running or self.done.done()):
                self.done.set_result(None)


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
