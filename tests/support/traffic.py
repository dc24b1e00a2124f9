"""Calls of a tier while its server is killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.records import key_of, record
from lmcache_async.tiers.base import Allocate
from lmcache_async.types import ChunkKey
from tests.support.outcomes import outcome

Put = Callable[[Sequence[tuple[ChunkKey, Buffer]]], Awaitable[list[TierError | None]]]
Get = Callable[[Sequence[ChunkKey], Allocate], Awaitable[list[Buffer | TierError | None]]]


class Traffic:
    """Tasks that put a record and get it, again and again, and check the bytes of every hit.

    Attributes:
        seen: Results so far: `hit`, `miss`, `drop` or the class name of an error.
        slowest_s: Longest time of a put and a get, in seconds.
    """

    def __init__(self, put: Put, get: Get, arena: Arena, allocate: Allocate) -> None:
        self.seen: set[str] = set()
        self.slowest_s = 0.0
        self._put, self._get, self._arena, self._allocate = put, get, arena, allocate
        self._ended = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for first in range(3):
                group.create_task(self._run(1_000_000 * first))
            try:
                yield
            finally:
                self._ended.set()

    async def seen_again(self, *what: str) -> None:
        self.seen.difference_update(what)
        while not self.seen.issuperset(what):
            await asyncio.sleep(0)

    async def _run(self, number: int) -> None:
        while not self._ended.is_set():
            number += 1
            start = time.monotonic()
            with record(self._arena, number) as buffer:
                try:
                    [error] = await self._put([(key_of(number), buffer)])
                    self.seen.update(() if error is None else ("drop",))
                    [result] = await self._get([key_of(number)], self._allocate)
                    self.seen.add(outcome(number, result))
                except TierUnavailableError:  # late
                    self.seen.update({"drop", "TierUnavailableError"})
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            await asyncio.sleep(0)
