"""Every chunk of every tier forgotten, on call."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from typing import Any

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.tiers.stack import TierStack


async def clear(
    stack: TierStack, running: AbstractSet[asyncio.Task[Any]], *, timeout_s: float, memory_only: bool
) -> int:
    """How many records were removed, once the stores under way have ended.

    Args:
        running: Calls that may still store.

    Raises:
        TierError: They did not end in time; or a tier could not be cleared, while the others were.
    """
    others = {task for task in running if task is not asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=timeout_s)
        if late:
            raise TierUnavailableError(f"{len(late)} calls did not end in {timeout_s} s; nothing cleared")
    if not await stack.flush(timeout_s=timeout_s):
        raise TierUnavailableError(f"writes did not end in {timeout_s} s; nothing cleared")
    removed = 0
    failure: TierError | None = None
    for stacked in stack.tiers:
        try:
            if not (memory_only and stacked.tier.capabilities.persistent):
                removed += await stacked.tier.clear()
        except TierError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return removed
