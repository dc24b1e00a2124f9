"""What became of a chunk that several tiers were given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.buffer import Buffer


def when_all(
    futures: Sequence[asyncio.Future[TierError | None]],
    kept: bool,
    error: TierError | None,
    position: int,
    on_outcome: Callable[[int, str], None],
) -> None:
    """Tell the chunk's outcome now, or when the last of its futures is done."""
    left = len(futures)

    def tell() -> None:
        results = [future.result() for future in futures]
        failures = [result for result in [*results, error] if result is not None]
        if kept or None in results or not failures:
            on_outcome(position, "")
        else:
            on_outcome(position, type(failures[0]).__name__)

    def one_done(_: asyncio.Future[TierError | None]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            tell()

    if not futures:
        tell()
    for future in futures:
        future.add_done_callback(one_done)


async def no_room(nbytes: int) -> Buffer:
    raise BudgetExceededError(f"no copy is made here, so {nbytes} bytes are not leased")


def release_all(buffers: Sequence[Buffer | None]) -> None:
    for buffer in buffers:
        if buffer is not None:
            buffer.release()
