"""What batch calls answer, chunk by chunk: for tiers with a `get_many` of their own, and for layers."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeAlias

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.tiers.border import ContractError, each

Read: TypeAlias = Buffer | TierError | None
"""What `get_many` answers of one chunk: its record, why there is none, or that it is not there."""


@contextlib.contextmanager
def reads(count: int) -> Iterator[list[Read]]:
    """So many answers, misses at first, to be filled in the block; where that raises, their leases end."""
    results: list[Read] = [None] * count
    try:
        yield results
    except BaseException:
        release_answers(results)
        raise


async def settle(results: list[Read], position: int, read: Awaitable[Buffer | None]) -> bool:
    """Put what one read comes to, its failure too, in its place; False when there was no memory for it."""
    task = running_task()
    try:
        results[position] = await read
    except TierError as error:
        results[position] = error
    except BudgetExceededError as error:  # the chunks that did find room are of use
        results[position] = no_memory(error)
        return False
    except BaseException as error:  # of one chunk's read, also SystemExit, which would end the event loop
        if is_ending(error, task):
            raise
        results[position] = ContractError.of("get", error)
    return True


async def settle_put(results: list[TierError | None], position: int, write: Awaitable[None]) -> None:
    """Put the failure of one write in its place, whatever it raises."""
    task = running_task()
    try:
        await write
    except TierError as error:
        results[position] = error
    except BaseException as error:  # as in `settle`
        if is_ending(error, task):
            raise
        results[position] = ContractError.of("put", error)


def no_memory(cause: BudgetExceededError) -> TierError:
    """Why a chunk was not read that is there."""
    error = TierError(f"no memory for a chunk to be read: {cause}")
    error.__cause__ = cause.with_traceback(None)  # its frames hold what was read
    return error


def memory_was_short(error: BaseException) -> bool:
    """Whether it was our own memory that a call did not get, which says nothing of the backend."""
    return isinstance(error, BudgetExceededError) or isinstance(error.__cause__, BudgetExceededError)


def release_answers(answers: Sequence[object]) -> None:
    """Release the buffers among these."""
    for answer in answers:
        if isinstance(answer, Buffer) and not answer.released:
            answer.release()


def check_answers(verb: str, answers: Sequence[object], asked: int) -> None:
    """There is one for each chunk; else the buffers among them are released.

    Raises:
        TierError: The tier inside breaks its contract.
    """
    try:
        each(verb, answers, asked)
    except ContractError:
        if isinstance(answers, Sequence):
            release_answers(answers)
        raise
