"""Calls of a tier by chunk number, with the results as text."""

from __future__ import annotations

import asyncio

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.records import check_record, key_of, record
from lmcache_async.tiers.base import Allocate, Tier


async def put(tier: Tier, arena: Arena, *numbers: int) -> list[TierError | None]:
    items = [(key_of(number), record(arena, number)) for number in numbers]
    try:
        return await tier.put_many(items)
    finally:
        for _, buffer in items:
            buffer.release()


async def get(tier: Tier, allocate: Allocate, *numbers: int) -> list[str]:
    """Get chunks. The result of each is `hit` for a right record, `miss`, or the class name of the error."""
    results = await tier.get_many([key_of(number) for number in numbers], allocate)
    return [outcome(number, result) for number, result in zip(numbers, results, strict=True)]


def outcome(number: int, result: Buffer | TierError | None) -> str:
    if isinstance(result, TierError):
        return type(result).__name__
    if result is None:
        return "miss"
    with result:
        check_record(result, number)
    return "hit"


async def until_hit(tier: Tier, arena: Arena, allocate: Allocate, number: int = 1) -> None:
    """Put and get a chunk until it is stored and is a hit."""
    while await put(tier, arena, number) != [None] or await get(tier, allocate, number) != ["hit"]:
        await asyncio.sleep(0)
