"""Log lines that cannot flood: once per cause, then at most one an interval with a count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class LimitedLogger:
    """Wraps a logger: the first line of a cause goes through, later ones at most once an interval.

    Args:
        logger: Where lines go.
        interval_s: Seconds between two lines of one cause.
        clock: Seconds, monotonic.
    """

    _MAX_CAUSES = 1000  # a cause that carries data must not grow the table for ever

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.logger = logger
        self._interval_s = interval_s
        self._clock = clock
        # When the last line of a cause went through, and how many were held back since.
        self._causes: dict[str, tuple[float | None, int]] = {}

    def report(self, cause: str, message: str, *arguments: object) -> None:
        self.log(logging.WARNING, cause, message, *arguments)

    def log(self, level: int, cause: str, message: str, *arguments: object, exc_info: bool = False) -> None:
        now = self._clock()
        last, held_back = self._causes.pop(cause, (None, 0))
        if last is not None and now - last < self._interval_s:
            # At the end again: the cause that was silent longest is forgotten first.
            self._causes[cause] = (last, held_back + 1)
            return
        if len(self._causes) >= self._MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        self._causes[cause] = (now, 0)
        if held_back:
            message = f"{message} ({held_back} more like this since the last line)"
        self.logger.log(level, message, *arguments, exc_info=exc_info)
