"""Queue of the parts of one copy, shared by several threads."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Part(NamedTuple):
    """Part of a copy. It writes to no plane before `first`."""

    first: int
    copy: Callable[[], object]


class PartQueue:
    """Thread-safe queue of the parts of one copy, in the order of their planes.

    Any number of threads call `work`.

    Args:
        planes: Number of planes of all parts.
        advance: Called with the number of leading planes that are written, on the thread that wrote the last
            of them.

    Attributes:
        done: Resolved when no part is running or waiting; holds the first error.
    """

    def __init__(self, parts: Iterable[Part], planes: int, advance: Callable[[int], object]) -> None:
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
        """Copy parts until none is left that writes to the first `planes` planes.

        Errors are not raised but set on `done`.

        Args:
            planes: Number of leading planes; None for all.
        """
        while (part := self._take(planes)) is not None:
            error = None
            try:
                part.copy()
            except BaseException as caught:  # noqa: BLE001 - set on `done`
                error = caught
            first = part.first
            del part  # drops the reference to the payload before `done` is resolved
            self._ended(first, error)

    def withdraw(self) -> None:
        """Discard the parts that no thread has begun."""
        with self._lock:
            self._whole = self._whole and not self._waiting
            self._waiting.clear()
        self._end_if_idle()

    def _take(self, planes: int | None) -> Part | None:
        with self._lock:
            if not self._waiting or (planes is not None and self._waiting[0].first >= planes):
                return None
            part = self._waiting.popleft()
            self._running.append(part.first)
            return part

    def _ended(self, first: int, error: BaseException | None) -> None:
        with self._lock:
            self._running.remove(first)
            if error is not None:
                self._error = self._error or error
                self._whole = False
                self._waiting.clear()
            if self._whole:
                following = [self._waiting[0].first] if self._waiting else []
                self._advance(min(self._running + following, default=self._planes))
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        with self._lock:
            if self._waiting or self._running or self.done.done():
                return
            if self._error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(self._error)
                self._error = None
