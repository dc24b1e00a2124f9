"""How far a load has come, so that the model may use its first layers while the last ones are copied."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from lmcache_async.device.cores import current_core

if TYPE_CHECKING:
    from collections.abc import Callable


class LoadProgress:
    """Told by whoever copies, waited for by the model's thread.

    Planes are counted in payload order. A copy that has begun is always waited for to its end, since it
    writes to device memory; one that has not begun in time is forbidden to begin.

    Args:
        num_planes: Planes of the layout.

    Attributes:
        core: Where the thread runs that made this, and that will wait.
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
        """Whether the waiting thread has given it up; then nothing of it is ever written."""
        return self._abandoned

    def begin(self) -> bool:
        """For the copier, before it writes. False: the load has been given up, and must not be written."""
        with self._changed:
            self._begun = not self._abandoned
            self._changed.notify_all()  # from here on there is no deadline
            return self._begun

    def advance(self, planes: int) -> None:
        """The first `planes` planes of every row of the load are written."""
        with self._changed:
            self._planes = max(self._planes, planes)
            self._changed.notify_all()

    def accept_help(self, work: Callable[[int], object]) -> None:
        """From now on who waits for the first n planes calls `work(n)`, which copies what nobody else has begun."""
        with self._changed:
            self._help = work
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing is written any more, whatever came of the load."""
        with self._changed:
            self._ended = True
            self._help = None
            self._changed.notify_all()

    def wait(self, planes: int, *, deadline: float) -> None:
        """Wait until the first `planes` planes are written, or the load has ended or is given up.

        The waiting thread copies too, where the copier lets it.

        Args:
            deadline: By `time.monotonic()`: a load that has not begun to write by then is given up.
        """
        planes = min(planes, self._num_planes)
        if self._settled(planes):  # without the lock: it only ever becomes true
            return
        if (work := self._wait(planes, deadline, helpless=False)) is not None:
            work(planes)
            self._wait(planes, deadline, helpless=True)

    def _wait(self, planes: int, deadline: float, *, helpless: bool) -> Callable[[int], object] | None:
        """Wait until it is settled, or until there is something to help with."""
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
        """Wait until nothing is written any more and the load's outcome is known.

        Returns:
            Whether that is so. Without it the load counts as failed: it was given up, or all of it is
            written and only its outcome is still to come.
        """
        self.wait(self._num_planes, deadline=deadline)
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, max(0.0, deadline - time.monotonic()))

    def _settled(self, planes: int) -> bool:
        return self._planes >= planes or self._ended or self._abandoned
