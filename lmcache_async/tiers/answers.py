"""What a batch of reads comes to, chunk by chunk: for a tier with a `get_many` of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeAlias

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer

Read: TypeAlias = Buffer | TierError | None
"""What `get_many` answers of one chunk: its record, why there is none, or that it is not there."""


@contextlib.contextmanager
def reads(count: int) -> Iterator[list[Read]]:
    """So many answers, misses at first, to be filled in the block; where that raises, their leases end."""
    results: list[Read] = [None] * count
    try:
        yield results
    except BaseException:
        for result in results:
            if isinstance(result, Buffer):
                result.release()
        raise


async def settle(results: list[Read], position: int, read: Awaitable[Buffer | None]) -> bool:
    """Put what one read comes to, its failure too, in its place; False when there was no memory for it."""
    try:
        results[position] = await read
    except TierError as error:
        results[position] = error
    except BudgetExceededError as error:  # the chunks that did find room are of use
        results[position] = no_memory(error)
        return False
    return True


def no_memory(cause: BudgetExceededError) -> TierError:
    """Why a chunk was not read that is there."""
    error = TierError(f"no memory for a chunk to be read: {cause}")
    error.__cause__ = cause.with_traceback(None)  # its frames hold what was read
    return error
