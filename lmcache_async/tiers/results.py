"""Per-chunk results of batch calls, for tiers that implement `get_many` and for layers."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeAlias

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.tiers.contract import ContractError, check_list

ReadResult: TypeAlias = Buffer | TierError | None
"""Result of `get_many` for one chunk: its record, its error, or None on a miss."""


@contextlib.contextmanager
def read_results(count: int) -> Iterator[list[ReadResult]]:
    """Provide a list of `count` results, initially misses. If the block raises, its buffers are released."""
    results: list[ReadResult] = [None] * count
    try:
        yield results
    except BaseException:
        release_results(results)
        raise


async def set_read_result(results: list[ReadResult], position: int, read: Awaitable[Buffer | None]) -> bool:
    """Store the result or the error of one read at its position. Return False if there was no memory for it."""
    task = running_task()
    try:
        results[position] = await read
    except TierError as error:
        results[position] = error
    except BudgetExceededError as error:  # the chunks that got memory are usable
        results[position] = no_memory(error)
        return False
    except BaseException as error:  # also SystemExit, which would end the event loop
        if is_ending(error, task):
            raise
        results[position] = ContractError.of("get", error)
    return True


async def set_write_result(results: list[TierError | None], position: int, write: Awaitable[None]) -> None:
    """Store the error of one write, of whatever type, at its position."""
    task = running_task()
    try:
        await write
    except TierError as error:
        results[position] = error
    except BaseException as error:  # as in `set_read_result`
        if is_ending(error, task):
            raise
        results[position] = ContractError.of("put", error)


def unwrap(result: ReadResult) -> Buffer | None:
    """Return the result of `get_many` for one chunk as `get` does: its error is raised."""
    if isinstance(result, TierError):
        raise result.__cause__ if isinstance(result.__cause__, BudgetExceededError) else result
    return result


def no_memory(cause: BudgetExceededError) -> TierError:
    """Return the error of a stored chunk for which there was no memory."""
    error = TierError(f"no memory for a chunk to be read: {cause}")
    error.__cause__ = cause.with_traceback(None)  # its frames hold views of the record
    return error


def memory_was_short(error: BaseException) -> bool:
    """Return whether a call failed for lack of local memory, which says nothing about the backend."""
    return isinstance(error, BudgetExceededError) or isinstance(error.__cause__, BudgetExceededError)


def release_results(results: object) -> None:
    """Release the buffers in a list of results. Anything else, as a third-party layer may return, is ignored."""
    for result in results if isinstance(results, list | tuple) else ():
        if isinstance(result, Buffer) and not result.released:
            result.release()


def check_results(verb: str, results: object, count: int) -> None:
    """Check the number of results of a layer inside. If it is wrong, the buffers among them are released.

    Raises:
        ContractError: The results are not a list, or their number is wrong.
    """
    try:
        check_list(verb, results, count)
    except ContractError:
        release_results(results)
        raise
