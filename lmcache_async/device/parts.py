"""One copy in parts that several threads take in turn."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Part(NamedTuple):
    """A part of a copy; it writes to planes from `first` on."""

    first: int
    copy: Callable[[], object]


class PartQueue:
    """Parts in the order of their planes; whoever has time takes the next one.

    Attributes:
        done: Ends when nothing is copied any more and nothing will be; it carries the first error.

    Args:
        planes: Of all parts together.
        advance: Told how many leading planes are written. Called by the thread that wrote the last of them.
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
        """Copy parts until none is left that writes to the first `planes` planes; None for all. Never raises."""
        while (part := self._take(planes)) is not None:
            error = None
            try:
                part.copy()
            except BaseException as caught:  # noqa: BLE001 - told to whoever waits for the whole
                error = caught
            first = part.first
            del part  # and with it the payload
            self._ended(first, error)

    def withdraw(self) -> None:
        """Forget the parts that nobody has begun."""
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
