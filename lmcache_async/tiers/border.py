"""The border between the engine and a tier: its failures, its answers, and the leases of its calls.

A tier is third-party code. Whatever it raises becomes a TierError, whatever it answers is checked for type
and count, and the memory that a call was given ends with the call. `BorderLayer` in `layers/border.py`
applies this to every call of a tier.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np

from lmcache_async.errors import BudgetExceededError, LMCacheAsyncError, TierError, TierFullError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.observability.logging import LimitedLogger, describe

T = TypeVar("T")

BUFFERS_PER_KEY = 2
"""Buffers of `allocate` that a call may hold for each of its keys: one to answer, one to work with.

Without a bound, a call that allocates without end would evict all that host memory holds.
"""

_READS = frozenset({"get", "get_many"})
_WRITES = frozenset({"put", "put_many"})


class ContractError(TierError):
    """A tier gave a wrong answer, or raised something else than TierError."""

    @classmethod
    def of(cls, verb: str, error: BaseException) -> ContractError:
        """What stands for an unexpected exception. It keeps no frame, and so no view of a buffer, alive."""
        drop_tracebacks(error)
        found = cls(f"{verb} raised {type(error).__name__}: {describe(error)}")
        found.__cause__ = error
        return found


def drop_tracebacks(error: BaseException) -> None:
    """Forget the frames that an error, its causes and its parts came through.

    Their variables hold views of buffers: a slab would stay busy for as long as anyone keeps the error.
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
    """An answer of yes or no: a bool, also NumPy's, or 0 or 1.

    Raises:
        ContractError: It is something else.
    """
    if isinstance(answer, bool):
        return answer
    if isinstance(answer, np.bool_) or (isinstance(answer, int) and answer in {0, 1}):
        return bool(answer)
    raise ContractError(f"{verb} gave {_kind(answer)}, not a bool")


def number(verb: str, answer: object, most: int | None = None) -> int:
    """A count, from 0 to `most`.

    Raises:
        ContractError: It is something else.
    """
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer):
        raise ContractError(f"{verb} gave {_kind(answer)}, not an int")
    found = int(answer)
    if found < 0 or (most is not None and found > most):
        raise ContractError(f"{verb} gave {found}, not a number from 0 to {'any' if most is None else most}")
    return found


def each(verb: str, answers: object, asked: int) -> list[object]:
    """A list of one answer for each chunk that was asked for.

    Raises:
        ContractError: It is no list, or of another length.
    """
    if not isinstance(answers, list | tuple | np.ndarray):
        raise ContractError(f"{verb} gave {_kind(answers)}, not a list")
    if len(answers) != asked:
        raise ContractError(f"{verb} gave {len(answers)} answers for {asked} chunks")
    return list(answers)


def read(verb: str, answer: object) -> Buffer | None:
    """A buffer that is not released, or None.

    Raises:
        ContractError: It is something else.
    """
    if answer is None:
        return None
    if not isinstance(answer, Buffer):
        raise ContractError(f"{verb} gave {_kind(answer)}, not a Buffer")
    if answer.released:
        raise ContractError(f"{verb} gave a buffer that is released")
    return answer


def flags(verb: str, answers: object, asked: int) -> list[bool]:
    """`flag` for each chunk."""
    return [flag(verb, answer) for answer in each(verb, answers, asked)]


def _kind(answer: object) -> str:
    if isinstance(answer, type):
        return f"the class {answer.__name__}"
    return "None" if answer is None else f"an object of type {type(answer).__name__}"


class Border:
    """What one tier raises and answers, as the engine takes it.

    Args:
        name: The tier's id, for messages.
        logger: Where broken contracts go, once per cause.
    """

    def __init__(self, name: str, logger: LimitedLogger) -> None:
        self._name = name
        self._logger = logger

    async def call(self, verb: str, run: Callable[[], object], check: Callable[[object], T]) -> T:
        """Await `run()` and check what it gives.

        A cancellation that the tier swallows is raised all the same.

        Args:
            verb: Of the tier, for messages.
            run: Gives an awaitable.
            check: Gives the answer in the right type; it raises ContractError where it is wrong.

        Raises:
            TierError: The tier failed, or broke its contract.
            BudgetExceededError: There was no memory for an answer.
        """
        task = running_task()
        cancels = 0 if task is None else task.cancelling()
        answer: object = None
        try:
            answer = await run()  # type: ignore[misc]  # a tier may give anything; `await` raises TypeError then
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError  # noqa: TRY301  # it goes the way of one that the tier passes on
            return check(answer)
        except BaseException as error:
            answer = None  # the frames of what is raised here hold no view of a buffer
            if is_ending(error, task):
                raise
            if task is not None and task.cancelling() > cancels:
                raise asyncio.CancelledError from None
            failure = self.failure(verb, error)
            raise failure from failure.__cause__

    def failure(self, verb: str, error: BaseException) -> TierError | BudgetExceededError:
        """The error that stands for what a tier raised; a broken contract is logged."""
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
        """One of the answers of `get_many`; one that is wrong becomes an error of that chunk."""
        if isinstance(answer, TierError):
            return self._chunk_error(verb, answer)
        try:
            return check(verb, answer)
        except ContractError as error:
            return self._chunk_error(verb, error)

    def reads(self, verb: str, answers: object, asked: int) -> list[Buffer | TierError | None]:
        """The answers of `get_many`.

        Raises:
            ContractError: There is not one answer for each chunk.
        """
        return [
            answer
            if answer is None or (isinstance(answer, Buffer) and not answer.released)
            else self.read(verb, answer)
            for answer in each(verb, answers, asked)
        ]

    def outcomes(self, verb: str, answers: object, asked: int) -> list[TierError | None]:
        """What `put_many` says of each chunk: None where it was stored, or why not.

        Raises:
            ContractError: There is not one answer for each chunk.
        """
        return [
            None if answer is None else self._chunk_error(verb, answer)
            for answer in each(verb, answers, asked)
        ]

    def _chunk_error(self, verb: str, answer: object) -> TierError:
        if not isinstance(answer, TierError):
            answer = ContractError(f"{verb} gave {_kind(answer)} for a chunk")
        failure = self.failure(verb, answer)
        assert isinstance(failure, TierError)  # as it was given one
        return failure


def _has_text(error: BaseException) -> bool:
    try:
        str(error)
    except BaseException:  # noqa: BLE001  # of a third party
        return False
    return True


class CallLeases:
    """The leases of one call of a tier. They end with the call, whatever the tier does with them.

    A tier may release a buffer that it was given, any number of times or not at all. What it answers
    becomes a buffer of the caller's, which the tier can neither use nor release any more.

    Args:
        border: The tier's.
        allocate: Gives memory for a read; None in a call that reads nothing.
        keys: How many chunks the call is about.
        foreign: Whether the tier answers leases of memory that is not from `allocate`.
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
        """For the tier: memory for a record.

        Raises:
            BudgetExceededError: There is none in time, the call holds as much as it may, or it has ended.
            TypeError: `nbytes` is no integer.
            ValueError: It is negative.
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
        """For a `put`: a read-only lease of the caller's buffer."""
        lease = buffer.lend(self)
        self._leases.append(lease)
        return lease

    def retained(self, lease: Buffer) -> None:
        """A further lease of a read's memory ends with the call too; of a put's buffer it is the tier's own."""
        if not lease.readonly:
            lease.owner = self
            self._further.append(lease)

    def answer(self, verb: str, answer: object) -> Buffer | None:
        """What `get` gave, as the caller's.

        Raises:
            ContractError: It is neither None nor a buffer that the tier may answer.
        """
        buffer = read(verb, answer)
        if buffer is None:
            return None
        if not self._may_give(buffer):
            raise ContractError(f"{verb} gave a buffer that is not of this call's allocate")
        return buffer.take_over()

    def answers(self, verb: str, answers: object, asked: int) -> list[Buffer | TierError | None]:
        """What `get_many` gave, as the caller's; a wrong answer for one chunk is that chunk's error.

        Raises:
            ContractError: There is not one answer for each chunk.
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
        """The call has ended: release what is left."""
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
