"""Checks of the results that a tier returns, and conversion of the exceptions that it raises.

`verb` is the name of the tier's method, for messages. A tier is third-party code. `TierHandle` applies these checks to every call.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from lmcache_async.errors import BudgetExceededError, LMCacheAsyncError, TierError, TierFullError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.buffer import Buffer

E = TypeVar("E", bound=BaseException)

_READS = frozenset({"get", "get_many"})
_WRITES = frozenset({"put", "put_many"})


class ContractError(TierError):
    """A tier returned an invalid result, or raised an exception other than TierError."""

    @classmethod
    def of(cls, verb: str, error: BaseException) -> ContractError:
        """Convert an unexpected exception. Its frames, and so views of buffers, are not kept alive."""
        drop_tracebacks(error)
        found = cls(f"{verb} raised {type(error).__name__}: {describe(error)}")
        found.__cause__ = error
        return found


def drop_tracebacks(error: E) -> E:
    """Remove the tracebacks of an error, of its causes and contexts, and of the members of a group. Return it.

    Local variables in the frames hold views of buffers: a slab would stay in use as long as the error is
    referenced.
    """
    left: list[BaseException] = [error]
    seen = set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return error


def check_flag(verb: str, result: object) -> bool:
    """Convert a boolean result of `verb`: a bool, a NumPy bool, or the int 0 or 1. Anything else is a ContractError."""
    if isinstance(result, bool):
        return result
    if isinstance(result, np.bool_) or (isinstance(result, int) and result in {0, 1}):
        return bool(result)
    raise ContractError(f"{verb} gave {_type_text(result)}, not a bool")


def check_flags(verb: str, results: object, count: int) -> list[bool]:
    """Apply `check_flag` to the result of each chunk."""
    return [
        one if isinstance(one, bool) else check_flag(verb, one) for one in check_list(verb, results, count)
    ]


def check_count(verb: str, result: object, most: int | None = None) -> int:
    """Convert a count from 0 to `most`, without limit if that is None. Anything else is a ContractError."""
    if isinstance(result, bool) or not isinstance(result, int | np.integer):
        raise ContractError(f"{verb} gave {_type_text(result)}, not an int")
    found = int(result)
    if found < 0 or (most is not None and found > most):
        raise ContractError(
            f"{verb} gave {found}, expected 0 or more{'' if most is None else f', at most {most}'}"
        )
    return found


def check_list(verb: str, results: object, count: int) -> list[object]:
    """Check that the result is a list with one element for each of `count` chunks. Else it is a ContractError."""
    if not isinstance(results, list | tuple | np.ndarray):
        raise ContractError(f"{verb} gave {_type_text(results)}, not a list")
    if len(results) != count:
        raise ContractError(f"{verb} gave {len(results)} answers for {count} chunks")
    return list(results)


class ErrorConverter:
    """Converts the exceptions of one tier to TierErrors, and logs its contract violations.

    Args:
        tier: Tier id, for messages.
        logger: Logger for contract violations, one line per cause.
    """

    def __init__(self, tier: str, logger: LimitedLogger) -> None:
        self._tier = tier
        self._logger = logger

    def convert(self, verb: str, error: BaseException) -> TierError | BudgetExceededError:
        """Convert an exception of a call. A contract violation is logged.

        A BudgetExceededError of a read is returned as it is, because it is the caller's memory that was short.
        """
        drop_tracebacks(error)
        if isinstance(error, ContractError):
            found = TierError(f"tier {self._tier!r}: {error}")
            self.report(f"{verb}.{type(error.__cause__ or error).__name__}", str(error))
            found.__cause__ = error.__cause__
            return found
        if isinstance(error, TierError) and _has_text(error):
            return error
        if not isinstance(error, LMCacheAsyncError):
            return self.convert(verb, ContractError.of(verb, error))
        if isinstance(error, BudgetExceededError) and verb in _READS:
            return error
        kind = TierFullError if isinstance(error, BudgetExceededError) and verb in _WRITES else TierError
        found = kind(f"tier {self._tier!r}: {verb} failed: {describe(error)}")
        found.__cause__ = error
        return found

    def convert_chunk(self, verb: str, result: object) -> TierError:
        """Convert the error of one chunk in the result of a batch call. Anything else is a contract violation."""
        if not isinstance(result, TierError):
            text = f"{_type_text(result)} for a chunk"
            if isinstance(result, Buffer):
                text = "a buffer that is " + (
                    "released" if result.released else "not of this call's allocate"
                )
            result = ContractError(f"{verb} gave {text}")
        error = self.convert(verb, result)
        assert isinstance(error, TierError)  # `result` is a TierError, for which `convert` returns one
        return error

    def report(self, cause: str, text: str) -> None:
        """Log a line about the tier, once per cause."""
        self._logger.report(f"{self._tier}.{cause}", "tier %r: %s", self._tier, text)


def _has_text(error: BaseException) -> bool:
    try:
        str(error)
    except BaseException:  # noqa: BLE001  # __str__ of a third-party class
        return False
    return True


def _type_text(result: object) -> str:
    if isinstance(result, type):
        return f"the class {result.__name__}"
    return "None" if result is None else f"an object of type {type(result).__name__}"
