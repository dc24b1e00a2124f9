"""Outcome of a chunk that is written to several tiers, and helpers of the tier stack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lmcache_async.errors import BudgetExceededError, ChainError, TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.types import ChunkKey


def when_all(
    futures: Sequence[asyncio.Future[TierError | None]],
    kept: bool,
    error: TierError | None,
    position: int,
    on_outcome: Callable[[int, str], None],
) -> None:
    """Report the outcome of a chunk now, or when the last of its futures is done.

    Args:
        futures: Results of the tiers that queued the chunk.
        kept: Whether a tier has stored the chunk already.
        error: Error of a tier that was written to at once, if any.
        position: Position of the chunk.
        on_outcome: Called with the position and "" if at least one tier stored the chunk, else the class name
            of an error.
    """
    if not futures:
        on_outcome(position, "" if kept or error is None else type(error).__name__)
        return
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

    for future in futures:
        future.add_done_callback(one_done)


def leaving(
    items: Sequence[tuple[ChunkKey, Buffer]], at_rest: Sequence[Buffer] | None, *, encrypted: bool
) -> Sequence[tuple[ChunkKey, Buffer]]:
    """Return the records for the tiers outside the arena.

    Args:
        items: Keys and plain records.
        at_rest: Encrypted records of the first `len(at_rest)` items; None if no stage encrypts.
        encrypted: Whether encryption is on.

    Raises:
        ChainError: Encryption is on and `at_rest` is None.
    """
    if at_rest is not None:
        return [(key, buffer) for (key, _), buffer in zip(items, at_rest, strict=False)]
    if encrypted:
        raise ChainError("encryption is on, but a stage of store.stages gives `write` no encrypted records")
    return items


async def no_room(nbytes: int) -> Buffer:
    raise BudgetExceededError(f"no copy is made here, so {nbytes} bytes are not leased")


def release_all(buffers: Sequence[Buffer | None]) -> None:
    for buffer in buffers:
        if buffer is not None:
            buffer.release()
