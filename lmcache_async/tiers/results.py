"""Results of tiers: helpers for batches of calls, one per chunk, and checks of results of third-party code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.logging import describe
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import is_ending, running_task

S = TypeVar("S")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

ReadResult: TypeAlias = Buffer | TierError | None
"""Result of `get_many` for one chunk: its record, its error, or None on a miss."""


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
    """Remove the tracebacks of an error, its causes and contexts, and the members of a group. Return the error.

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


@contextlib.contextmanager
def read_results(count: int) -> Iterator[list[ReadResult]]:
    """Provide a list of `count` results, initially misses. If the block raises, the buffers in the list are released."""
    results: list[ReadResult] = [None] * count
    try:
        yield results
    except BaseException:
        release_results(results)
        raise


async def result_of(verb: str, call: Awaitable[T]) -> T | TierError:
    """Await a call for one chunk. Return its result, or its exception converted to a TierError.

    An exception that ends the calling task (see `is_ending`) is raised.
    """
    task = running_task()
    try:
        return await call
    except BaseException as error:  # also SystemExit, which would end the event loop
        if is_ending(error, task):
            raise
        if verb == "get" and isinstance(error, BudgetExceededError):
            return no_memory(error)  # the chunks that got memory are usable
        return error if isinstance(error, TierError) else ContractError.of(verb, error)


async def run_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Await `work` for each item, at most `workers` at a time."""
    left = iter(items)

    async def run() -> None:
        for item in left:
            await work(item)

    if workers <= 1:
        await run()
        return
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for _ in range(workers)]
    if any(task.cancelled() for task in tasks):
        raise ContractError("a call for one chunk cancelled its own task")


async def call_each(
    verb: str, items: Sequence[S], call: Callable[[S], Awaitable[T]], workers: int
) -> list[T | TierError]:
    """Return the result or error of the call for each item, as `result_of` does. If cancelled, release all buffers."""
    results: list[Any] = [None] * len(items)

    async def one(position: int) -> None:
        results[position] = await result_of(verb, call(items[position]))

    try:
        await run_each(range(len(items)), one, min(len(items), workers))
    except BaseException:
        release_results(results)
        raise
    return results


def unwrap(result: ReadResult) -> Buffer | None:
    """Return the result of `get_many` for one chunk, or raise it if it is an error, as `get` does."""
    if isinstance(result, TierError):
        raise result.__cause__ if isinstance(result.__cause__, BudgetExceededError) else result
    return result


def no_memory(cause: BudgetExceededError) -> TierError:
    """Return the error for a stored chunk that was not read because no memory was free."""
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


def check_flag(verb: str, result: object) -> bool:
    """Convert a boolean result of `verb`: a bool, a NumPy bool, or the int 0 or 1. Else raise ContractError."""
    if isinstance(result, bool):
        return result
    if isinstance(result, np.bool_) or (isinstance(result, int) and result in {0, 1}):
        return bool(result)
    raise ContractError(f"{verb} returned {type_text(result)}, not a bool")


def check_count(verb: str, result: object, most: int | None = None) -> int:
    """Convert a count between 0 and `most` (None for no limit) to an int. Raise ContractError for anything else."""
    if isinstance(result, bool) or not isinstance(result, int | np.integer):
        raise ContractError(f"{verb} returned {type_text(result)}, not an int")
    found = int(result)
    if found < 0 or (most is not None and found > most):
        limit = "" if most is None else f", at most {most}"
        raise ContractError(f"{verb} returned {found}, expected 0 or more{limit}")
    return found


def check_list(verb: str, results: object, count: int) -> list[object]:
    """Return the result as a list with one element for each of `count` chunks. Raise ContractError for anything else."""
    if not isinstance(results, list | tuple | np.ndarray):
        raise ContractError(f"{verb} returned {type_text(results)}, not a list")
    if len(results) != count:
        raise ContractError(f"{verb} returned {len(results)} answers for {count} chunks")
    return list(results)


def type_text(result: object) -> str:
    """Describe the type of an invalid result, for messages."""
    if isinstance(result, type):
        return f"the class {result.__name__}"
    return "None" if result is None else f"an object of type {type(result).__name__}"
