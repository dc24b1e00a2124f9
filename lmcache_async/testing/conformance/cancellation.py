"""Tests of cancellation at every await of every method, also while a call waits for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance.base import (
    Cases,
    holds,
    in_time,
    leases_are_back,
    leases_content,
    put,
    record,
    release_all,
    scribble,
)
from lmcache_async.testing.records import key_of
from lmcache_async.testing.steps import cancelled_at_await, cancelled_at_each_await
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.types import ChunkKey

CHUNKS = 4
"""Chunks of a batch."""

Items = Sequence[tuple[ChunkKey, Buffer]]
Verb = Callable[[Tier, Items, Allocate], Coroutine[Any, Any, Any]]

WRITES: dict[str, Verb] = {
    "put": lambda tier, items, _: tier.put(*items[0]),
    "put_many": lambda tier, items, _: tier.put_many(items),
}
OTHERS: dict[str, Verb] = {
    "get": lambda tier, items, allocate: tier.get(items[0][0], allocate),
    "get_many": lambda tier, items, allocate: tier.get_many([key for key, _ in items], allocate),
    "remove": lambda tier, items, _: tier.remove(items[0][0]),
    "contains": lambda tier, items, _: tier.contains(items[0][0]),
    "contains_many": lambda tier, items, _: tier.contains_many([key for key, _ in items]),
    "count_prefix": lambda tier, items, _: tier.count_prefix([key for key, _ in items]),
    "clear": lambda tier, *_: tier.clear(),
    "scrub": lambda tier, *_: tier.scrub(),
}


class CancellationCases(Cases):
    """A cancelled call ends, holds no lease, reads no buffer afterwards, and stores whole chunks or none."""

    @pytest.mark.parametrize("verb", [*WRITES, *OTHERS])
    async def test_a_call_cancelled_at_any_await_leaves_the_tier_whole_and_no_lease(
        self, opened: Tier, arena: Arena, allocate: Allocate, verb: str
    ) -> None:
        call = WRITES.get(verb) or OTHERS[verb]
        given: list[Buffer] = []

        async def start(attempt: int) -> Any:
            items = [(key_of(number), record(arena, number)) for number in _numbers(verb, attempt)]
            given.extend(buffer for _, buffer in items)
            return await call(opened, items, _with_more_awaits(allocate))

        attempt = 0
        await _prepare(opened, arena, verb, attempt)
        async for task in cancelled_at_each_await(start):
            if not task.cancelled():
                release_all(task.result())
            while given:
                given.pop().release()
            scribble(arena)  # a read after the cancellation would return wrong bytes
            await leases_are_back(opened, arena)
            for number in _numbers(verb, attempt):
                await holds(opened, number, allocate)
            attempt += 1
            await _prepare(opened, arena, verb, attempt)
        await put(opened, arena, range(CHUNKS))
        assert all([await holds(opened, number, allocate) for number in range(CHUNKS)]), "it works no more"

    @pytest.mark.parametrize("verb", [*WRITES, *OTHERS])
    async def test_a_cancellation_is_not_swallowed(
        self, opened: Tier, arena: Arena, allocate: Allocate, verb: str
    ) -> None:
        call = WRITES.get(verb) or OTHERS[verb]
        await _prepare(opened, arena, verb, 0)
        items = [(key_of(number), record(arena, number)) for number in range(CHUNKS)]
        for number in range(10):
            task = await cancelled_at_await(call(opened, items, allocate), number)
            if not task.cancelled():
                release_all(task.result())
                break  # the call has no more awaits
        for _, buffer in items:
            buffer.release()
        await leases_are_back(opened, arena)

    @pytest.mark.parametrize("verb", ["get", "get_many"])
    async def test_a_read_cancelled_while_it_waits_for_memory_holds_none(
        self, opened: Tier, arena: Arena, allocate: Allocate, verb: str
    ) -> None:
        if leases_content(opened):
            return  # it allocates no memory
        await put(opened, arena, range(CHUNKS))
        waiting = asyncio.Event()
        left = iter(range(CHUNKS - 1 if verb == "get_many" else 0))

        async def scarce(nbytes: int) -> Buffer:
            if next(left, None) is not None:
                return await allocate(nbytes)
            waiting.set()
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody ends this wait")

        items = [(key_of(number), record(arena, number)) for number in range(CHUNKS)]
        for _, buffer in items:
            buffer.release()
        task = asyncio.ensure_future(OTHERS[verb](opened, items, scarce))
        await in_time(waiting.wait())
        task.cancel()
        await in_time(asyncio.wait({task}))

        assert task.cancelled()
        await leases_are_back(opened, arena)
        assert await holds(opened, 0, allocate)


def _numbers(verb: str, attempt: int) -> range:
    """Return new chunks for each write, so that none is stored yet, and the same ones for other calls."""
    start = CHUNKS * attempt if verb in WRITES else 0
    return range(start, start + CHUNKS)


async def _prepare(tier: Tier, arena: Arena, verb: str, attempt: int) -> None:
    """Store the chunks that the next call reads or removes."""
    if verb not in WRITES:
        await put(tier, arena, _numbers(verb, attempt))


def _with_more_awaits(allocate: Allocate) -> Allocate:
    """Wrap `allocate` with an await before and after it, as when other callers wait for memory too."""

    async def slow(nbytes: int) -> Buffer:
        await asyncio.sleep(0)
        buffer = await allocate(nbytes)
        try:
            await asyncio.sleep(0)
        except BaseException:
            buffer.release()
            raise
        return buffer

    return slow
