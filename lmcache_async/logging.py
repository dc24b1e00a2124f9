"""Rate-limited log lines, and a handler that adds the product name in the log of another program."""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable

NAME = "lmcache-async"


class NamedHandler(logging.Handler):
    """Passes records to the handlers of another logger, with the product name before the message.

    The handlers are read for each record, so later changes of the other logger take effect.
    """

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self.target = target

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a copy, because the record itself may go to other handlers too."""
        named = copy.copy(record)
        named.msg = f"{NAME}: {record.msg}"
        for handler in self.target.handlers:
            if named.levelno >= handler.level:
                handler.handle(named)


class LimitedLogger:
    """Logs the first line of a cause at once, and later ones at most once per interval."""

    _MAX_CAUSES = 1000  # a cause may contain data, so the number of causes is not limited otherwise

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.logger = logger
        self._interval_s = interval_s
        self._clock = clock
        # Time of the last line of a cause, and the number of lines held back since.
        self._causes: dict[str, tuple[float | None, int]] = {}

    def report(self, cause: str, message: str, *arguments: object) -> None:
        """Log a warning."""
        self.log(logging.WARNING, cause, message, *arguments, stacklevel=2)

    def exception(self, message: str, *arguments: object) -> None:
        """Log the error that is being handled, with its traceback. Errors of the same type and text are one cause."""
        error = sys.exception()
        cause = f"{type(error).__name__}: {describe(error)}" if error is not None else message
        self.log(logging.ERROR, cause, f"{message}: %s", *arguments, cause, exc_info=True, stacklevel=2)

    def log(
        self,
        level: int,
        cause: str,
        message: str,
        *arguments: object,
        exc_info: bool = False,
        stacklevel: int = 1,
    ) -> None:
        """Log a line with the arguments of `logging.Logger.log`. Its source location is that of the caller.

        Unprintable characters of texts among the arguments are escaped: clients choose request ids.
        """
        now = self._clock()
        last, held_back = self._causes.pop(cause, (None, 0))
        if last is not None and now - last < self._interval_s:
            # Move it to the end: the cause that was silent longest is dropped first.
            self._causes[cause] = (last, held_back + 1)
            return
        if len(self._causes) >= self._MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        self._causes[cause] = (now, 0)
        if held_back:
            message = f"{message} ({held_back} more like this since the last line)"
        arguments = tuple(one_line(each) if isinstance(each, str) else each for each in arguments)
        self.logger.log(level, message, *arguments, exc_info=exc_info, stacklevel=stacklevel + 1)


def one_line(text: str) -> str:
    """Return the text with its unprintable characters escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def describe(error: BaseException) -> str:
    """Return the text of an error, or a placeholder if its `__str__` raises."""
    try:
        return str(error)
    except BaseException as failure:  # noqa: BLE001  # errors of third parties are reported here
        return f"<no error text: __str__ raised {type(failure).__name__}>"
