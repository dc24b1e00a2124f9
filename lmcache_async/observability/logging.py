"""Log lines that cannot flood, and that carry the name of the product in the log of another program."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable

NAME = "lmcache-async"


class NamedHandler(logging.Handler):
    """Passes records on to the handlers of another logger, with the name of the product before the message.

    The handlers are looked up for each record, so a later change of the other logger counts.

    Args:
        target: The other logger, whose format does not show logger names.
    """

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a copy on; the record itself may go to other handlers too."""
        named = copy.copy(record)
        named.msg = f"{NAME}: {record.msg}"
        for handler in self.target.handlers:
            if named.levelno >= handler.level:
                handler.handle(named)


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
        self.log(logging.WARNING, cause, message, *arguments, stacklevel=2)

    def log(
        self,
        level: int,
        cause: str,
        message: str,
        *arguments: object,
        exc_info: bool = False,
        stacklevel: int = 1,
    ) -> None:
        """Args as of `logging.Logger.log`; the line is said to be the caller's."""
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
        self.logger.log(level, message, *arguments, exc_info=exc_info, stacklevel=stacklevel + 1)


def describe(error: BaseException) -> str:
    """The text of an error, whatever its `__str__` does."""
    try:
        return str(error)
    except BaseException as failure:  # noqa: BLE001  # of a third party, and this is where errors are reported
        return f"<its text is not available: __str__ raised {type(failure).__name__}>"
