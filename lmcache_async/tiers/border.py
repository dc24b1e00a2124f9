"""Enforcement of the tier contract: errors, results and leases of the calls of a tier.

A tier is third-party code. Exceptions that it raises are converted to TierErrors, results are checked for type
and length, and memory that a call received is released when the call ends. `BorderLayer` in
`layers/border.py` applies this to every call of a tier.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from lmcache_async.errors import BudgetExceededError, LMCacheAsyncError, TierError, TierFullError
from lmcache_async.logging import LimitedLogger, describe
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task

T = TypeVar("T")

BUFFERS_PER_KEY = 2
"""Buffers of `allocate` that a call may hold per key: one to return and one to work with.

Without a bound, a call that never stops allocating would evict the whole content of host memory.
"""

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


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an error, of its causes and contexts, and of the members of a group.

    Local variables in the frames hold views of buffers: a slab would stay in use as long as the error is
    referenced.
    """
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def flag(verb: str, answer: object) -> bool:
    """Convert a boolean result: a bool, a NumPy bool, or the int 0 or 1.

    Args:
        verb: Name of the method, for messages.
        answer: Result of the tier.

    Raises:
        ContractError: The result is something else.
    """
    if isinstance(answer, bool):
        return answer
    if isinstance(answer, np.bool_) or (isinstance(answer, int) and answer in {0, 1}):
        return bool(answer)
    raise ContractError(f"{verb} gave {_kind(answer)}, not a bool")


def number(verb: str, answer: object, most: int | None = None) -> int:
    """Convert a count from 0 to `most`.

    Args:
        verb: Name of the method, for messages.
        answer: Result of the tier.
        most: Largest valid count; None for no limit.

    Raises:
        ContractError: The result is not an integer in that range.
    """
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer):
        raise ContractError(f"{verb} gave {_kind(answer)}, not an int")
    found = int(answer)
    if found < 0 or (most is not None and found > most):
        raise ContractError(f"{verb} gave {found}, not a number from 0 to {'any' if most is None else most}")
    return found


def each(verb: str, answers: object, asked: int) -> list[object]:
    """Check that the result is a list with one element for each requested chunk.

    Args:
        verb: Name of the method, for messages.
        answers: Result of the tier.
        asked: Number of requested chunks.

    Raises:
        ContractError: The result is not a list, or has another length.
    """
    if not isinstance(answers, list | tuple | np.ndarray):
        raise ContractError(f"{verb} gave {_kind(answers)}, not a list")
    if len(answers) != asked:
        raise ContractError(f"{verb} gave {len(answers)} answers for {asked} chunks")
    return list(answers)


def read(verb: str, answer: object) -> Buffer | None:
    """Check that the result is a buffer that is not released, or None.

    Args:
        verb: Name of the method, for messages.
        answer: Result of the tier.

    Raises:
        ContractError: The result is something else.
    """
    if answer is None:
        return None
    if not isinstance(answer, Buffer):
        raise ContractError(f"{verb} gave {_kind(answer)}, not a Buffer")
    if answer.released:
        raise ContractError(f"{verb} gave a buffer that is released")
    return answer


def flags(verb: str, answers: object, asked: int) -> list[bool]:
    """Apply `flag` to the result for each chunk."""
    return [flag(verb, answer) for answer in each(verb, answers, asked)]


def _kind(answer: object) -> str:
    if isinstance(answer, type):
        return f"the class {answer.__name__}"
    return "None" if answer is None else f"an object of type {type(answer).__name__}"


class Border:
    """Checks the results and converts the errors of one tier.

    Args:
        name: Tier id, for messages.
        logger: Logger for contract violations, one line per cause.
    """

    def __init__(self, name: str, logger: LimitedLogger) -> None:
        self._name = name
        self._logger = logger

    async def call(self, verb: str, run: Callable[[], object], check: Callable[[object], T]) -> T:
        """Await `run()` and check its result.

        If the tier suppresses a cancellation, CancelledError is raised all the same.

        Args:
            verb: Name of the method, for messages.
            run: Returns an awaitable.
            check: Returns the result in the expected type; raises ContractError if it is invalid.

        Raises:
            TierError: The tier failed or violated its contract.
            BudgetExceededError: There was no memory for the result.
        """
        task = running_task()
        cancels = 0 if task is None else task.cancelling()
        answer: object = None
        try:
            answer = await run()  # type: ignore[misc]  # a tier may return any object; `await` raises TypeError then
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError  # noqa: TRY301  # handled below like one that the tier raises
            return check(answer)
        except BaseException as error:
            answer = None  # or the traceback would keep a view of a buffer alive
            if is_ending(error, task):
                raise
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError from None
            failure = self.failure(verb, error)
            raise failure from failure.__cause__

    def failure(self, verb: str, error: BaseException) -> TierError | BudgetExceededError:
        """Convert an exception of a tier. A contract violation is logged."""
        drop_tracebacks(error)
        if isinstance(error, ContractError):
            found = TierError(f"tier {self._name!r}: {error}")
            self.report(f"{verb}.{type(error.__cause__ or error).__name__}", str(error))
            found.__cause__ = error.__cause__
            return found
        if isinstance(error, TierError) and _has_text(error):
            return error
        if not isinstance(error, LMCacheAsyncError):
            return self.failure(verb, ContractError.of(verb, error))
        if isinstance(error, BudgetExceededError) and verb in _READS:
            return error
        kind = TierFullError if isinstance(error, BudgetExceededError) and verb in _WRITES else TierError
        found = kind(f"tier {self._name!r}: {verb} failed: {describe(error)}")
        found.__cause__ = error
        return found

    def report(self, cause: str, text: str) -> None:
        """Log a line about the tier, once per cause."""
        self._logger.report(f"{self._name}.{cause}", "tier %r: %s", self._name, text)

    def read(
        self, verb: str, answer: object, check: Callable[[str, object], Buffer | None] = read
    ) -> Buffer | TierError | None:
        """Check one element of the result of `get_many`; an invalid one becomes the error of that chunk."""
        if isinstance(answer, TierError):
            return self._chunk_error(verb, answer)
        try:
            return check(verb, answer)
        except ContractError as error:
            return self._chunk_error(verb, error)

    def reads(self, verb: str, answers: object, asked: int) -> list[Buffer | TierError | None]:
        """Check the result of `get_many`.

        Raises:
            ContractError: The number of results differs from the number of chunks.
        """
        return [
            answer
            if answer is None or (isinstance(answer, Buffer) and not answer.released)
            else self.read(verb, answer)
            for answer in each(verb, answers, asked)
        ]

    def outcomes(self, verb: str, answers: object, asked: int) -> list[TierError | None]:
        """Check the result of `put_many`: for each chunk None if it was stored, else the error.

        Raises:
            ContractError: The number of results differs from the number of chunks.
        """
        return [
            None if answer is None else self._chunk_error(verb, answer)
            for answer in each(verb, answers, asked)
        ]

    def _chunk_error(self, verb: str, answer: object) -> TierError:
        if not isinstance(answer, TierError):
            answer = ContractError(f"{verb} gave {_kind(answer)} for a chunk")
        failure = self.failure(verb, answer)
        assert isinstance(failure, TierError)  # `answer` is a TierError, for which `failure` returns one
        return failure


def _has_text(error: BaseException) -> bool:
    try:
        str(error)
    except BaseException:  # noqa: BLE001  # __str__ of a third-party class
        return False
    return True


class CallLeases:
    """Leases of one call of a tier. They end with the call, whatever the tier does with them.

    A tier may release a buffer that it received, any number of times or not at all. A buffer that it returns
    is transferred to the caller; the tier can neither use nor release it any more.

    Args:
        border: Checks of the tier.
        allocate: Leases memory for a read; None in a call that reads nothing.
        keys: Number of chunks of the call.
        foreign: Whether the tier returns leases of memory that is not from `allocate`.
    """

    def __init__(
        self,
        border: Border,
        allocate: Callable[[int], Awaitable[Buffer]] | None = None,
        keys: int = 0,
        *,
        foreign: bool = False,
    ) -> None:
        self._border = border
        self._allocate = allocate
        self._most = BUFFERS_PER_KEY * keys
        self._foreign = foreign
        self._leases: list[Buffer] = []
        self._further: list[Buffer] = []
        self._ended = False

    async def allocate(self, nbytes: int) -> Buffer:
        """Lease memory for a record. Called by the tier.

        Args:
            nbytes: Length in bytes.

        Raises:
            BudgetExceededError: No memory is free in time, the call holds `BUFFERS_PER_KEY` buffers per key,
                or it has ended.
            TypeError: `nbytes` is not an integer.
            ValueError: `nbytes` is negative.
        """
        wanted = operator.index(nbytes)
        self._check_room()
        assert self._allocate is not None
        buffer = await self._allocate(wanted)
        if self._ended:
            buffer.release()
            raise BudgetExceededError("the call of the tier ended while it waited for memory")
        buffer.owner = self
        self._leases.append(buffer)
        return buffer

    def lend(self, buffer: Buffer) -> Buffer:
        """Return a read-only lease of the caller's buffer, for a `put`."""
        lease = buffer.lend(self)
        self._leases.append(lease)
        return lease

    def retained(self, lease: Buffer) -> None:
        """Register a further lease that the tier took with `retain`.

        Further leases of a read's memory end with the call. Further leases of a put's buffer belong to the
        tier.
        """
        if not lease.readonly:
            lease.owner = self
            self._further.append(lease)

    def answer(self, verb: str, answer: object) -> Buffer | None:
        """Check the result of `get` and transfer it to the caller.

        Raises:
            ContractError: The result is neither None nor a buffer that the tier may return.
        """
        buffer = read(verb, answer)
        if buffer is None:
            return None
        if not self._may_give(buffer):
            raise ContractError(f"{verb} gave a buffer that is not of this call's allocate")
        return buffer.take_over()

    def answers(self, verb: str, answers: object, asked: int) -> list[Buffer | TierError | None]:
        """Check the result of `get_many` and transfer its buffers to the caller.

        An invalid element becomes the error of that chunk.

        Raises:
            ContractError: The number of results differs from the number of chunks.
        """
        try:
            given = each(verb, answers, asked)
        except ContractError:
            if self._foreign and isinstance(answers, list | tuple):
                self._release_foreign(answers)
            raise
        return [
            answer.take_over()
            if isinstance(answer, Buffer) and not answer.released and self._may_give(answer)
            else None
            if answer is None
            else self._border.read(verb, answer, self.answer)
            for answer in given
        ]

    def close(self) -> None:
        """End the call: release the remaining leases."""
        self._ended = True
        for leases in (self._leases, self._further):
            for lease in leases:
                if not lease.released:
                    lease.release()
            leases.clear()

    def _may_give(self, buffer: Buffer) -> bool:
        return buffer.owner is self or (self._foreign and buffer.owner is None)

    def _release_foreign(self, answers: list[object] | tuple[object, ...]) -> None:
        for answer in answers:
            if isinstance(answer, Buffer) and answer.owner is None and not answer.released:
                answer.release()

    def _check_room(self) -> None:
        if self._ended:
            raise BudgetExceededError("the call of the tier has ended; allocate is for a call's own answer")
        if len(self._leases) < self._most:
            return
        self._leases = [lease for lease in self._leases if not lease.released]
        if len(self._leases) >= self._most:
            raise BudgetExceededError(f"a call of the tier holds {self._most} buffers, the most that it may")
