"""Progress of a layer-wise load: the model uses the first layers while later ones are copied."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from lmcache_async.device.cores import current_core

if TYPE_CHECKING:
    from collections.abc import Callable


class LoadProgress:
    """Progress of one load, set by the copier and awaited by the model thread.

    Planes are counted in payload order. A copy that has begun is always awaited to its end, because it writes
    to device memory. A copy that has not begun at the deadline is abandoned and must not begin.

    Create it on the thread that will wait.

    Args:
        num_planes: Number of planes of the layout.

    Attributes:
        core: Core of the creating thread; None if it cannot be determined.
    """

    def __init__(self, num_planes: int) -> None:
        self.core = current_core()
        self._num_planes = num_planes
        self._changed = threading.Condition()
        self._planes = 0
        self._begun = False
        self._abandoned = False
        self._ended = False
        self._help: Callable[[int], object] | None = None

    @property
    def abandoned(self) -> bool:
        """Whether the waiting thread has abandoned the load. An abandoned load is never written."""
        return self._abandoned

    def begin(self) -> bool:
        """Called by the copier before it writes.

        Returns:
            False if the load is abandoned and must not be written.
        """
        with self._changed:
            self._begun = not self._abandoned
            self._changed.notify_all()  # the waiting thread then waits without a deadline
            return self._begun

    def advance(self, planes: int) -> None:
        """Report that the first `planes` planes of every row of the load are written."""
        with self._changed:
            self._planes = max(self._planes, planes)
            self._changed.notify_all()

    def accept_help(self, work: Callable[[int], object]) -> None:
        """Let the waiting thread copy too.

        Args:
            work: `work(n)` copies the parts of the first n planes that no other thread has begun. A thread
                that waits for n planes calls it.
        """
        with self._changed:
            self._help = work
            self._changed.notify_all()

    def end(self) -> None:
        """Report that the load writes no more, whether it succeeded or failed."""
        with self._changed:
            self._ended = True
            self._help = None
            self._changed.notify_all()

    def wait(self, planes: int, *, deadline: float) -> None:
        """Block until the first `planes` planes are written, or the load has ended or is abandoned.

        The waiting thread copies too if the copier supports it; see `accept_help`.

        Args:
            planes: Number of leading planes.
            deadline: Value of `time.monotonic()`. A load that has not begun to write by then is abandoned.
        """
        planes = min(planes, self._num_planes)
        if self._settled(planes):  # without the lock: once true, it stays true
            return
        if (work := self._wait(planes, deadline, helpless=False)) is not None:
            work(planes)
            self._wait(planes, deadline, helpless=True)

    def _wait(self, planes: int, deadline: float, *, helpless: bool) -> Callable[[int], object] | None:
        """Wait until `_settled`; unless `helpless`, return the function of `accept_help` once it is set."""
        with self._changed:
            while not self._settled(planes):
                if self._help is not None and not helpless:
                    return self._help
                left = None if self._begun else deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._abandoned = True
                else:
                    self._changed.wait(left)
        return None

    def wait_ended(self, *, deadline: float) -> bool:
        """Block until the load writes no more and its outcome is known.

        Args:
            deadline: As for `wait`.

        Returns:
            False if the outcome is not known at the deadline. The load then counts as failed: it was
            abandoned, or all planes are written and only its outcome is missing.
        """
        self.wait(self._num_planes, deadline=deadline)
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, max(0.0, deadline - time.monotonic()))

    def _settled(self, planes: int) -> bool:
        return self._planes >= planes or self._ended or self._abandoned
