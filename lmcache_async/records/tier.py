"""Records of a tier that is opened in this process, within its deadlines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Self, TypeVar

from lmcache_async.errors import BudgetExceededError, ConfigError, TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer
from lmcache_async.memory.threads import WorkerPool, in_thread
from lmcache_async.records.look import Looked, look_at
from lmcache_async.records.target import Look, Target
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import ChunkKey

T = TypeVar("T")

_ALLOCATE_S = 600.0  # each call that holds memory has a deadline of its own
_LOOKUP_BATCH = 256


class TierTarget(Target):
    """A tier and what it holds. Records are read whole: a tier gives no parts of one.

    Args:
        tier: Not opened yet, behind its border: calls end in time, and as TierError.
        name: The tier's id.
        max_record_bytes: Memory for one record.
        timeout_s: Seconds between two keys of a list; other calls have the deadlines of the border.
    """

    def __init__(
        self, tier: Tier, *, name: str, max_record_bytes: int, in_flight: int = 4, timeout_s: float = 30.0
    ) -> None:
        self.name = f"tier {name!r}"
        self.in_flight = in_flight
        self._tier = tier
        self._timeout_s = timeout_s
        self._workers = WorkerPool(in_flight, thread_name_prefix="lmcache-records")
        slab_bytes = -(-max_record_bytes // PAGE) * PAGE
        slabs = 2 * in_flight + 2  # a late call keeps its buffer for as long as it works
        self._arena = Arena(slabs * slab_bytes, slab_bytes, huge_pages=False, prefault=False)

    async def list(self) -> Sequence[Kept]:
        self._check(self._tier.capabilities.lists, "list its records; a tier that can is needed for this")
        found: list[Kept] = []
        keys = aiter(self._tier.keys())
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    found.append(Kept(await anext(keys)))
            except StopAsyncIteration:
                return found
            except TimeoutError as error:
                raise TierUnavailableError(
                    f"{self.name} listed {len(found)} keys, and then gave no answer in {self._timeout_s} s"
                ) from error

    async def head(self, kept: Kept) -> Looked | None:
        return await self.examine(kept, lambda pieces: look_at(kept, next(pieces)))

    async def examine(self, kept: Kept, look: Look[T]) -> T | None:
        buffer = await self.load(kept)
        if buffer is None:
            return None
        with buffer:
            return await in_thread(self._workers, functools.partial(_look, look, buffer.view))

    async def load(self, kept: Kept) -> Buffer | None:
        try:
            return await self._tier.get(kept.key, self._allocate)
        except BudgetExceededError as error:
            raise TierError(
                f"record {kept.key.hex()}: {error}; raise --max-record-bytes if records are longer"
            ) from error

    async def allocate(self, nbytes: int) -> Buffer | None:
        return await self._allocate(nbytes) if nbytes <= self._arena.slab_bytes else None

    async def has(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        there: list[bool] = []
        for start in range(0, len(keys), _LOOKUP_BATCH):
            there += await self._tier.contains_many(keys[start : start + _LOOKUP_BATCH])
        return there

    async def save(self, key: ChunkKey, record: Buffer, stamp: int) -> None:
        del stamp  # a tier keeps its own order of use
        self._check(self._tier.capabilities.writes, "be written to from here: it only reads")
        await self._tier.put(key, record)

    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        self._check(self._tier.capabilities.removes, "remove records")
        for key in keys:
            await self._tier.remove(key)

    async def set_aside(self, key: ChunkKey, cause: str) -> None:
        self._check(self._tier.capabilities.removes, "put records aside")
        await self._tier.reject(key, cause)

    async def sync(self) -> None:
        """A tier's `put` has kept what it returned from."""

    async def __aenter__(self) -> Self:
        try:
            self._tier.bind(self._arena)
            await self._tier.__aenter__()
        except BaseException:
            self._free()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._tier.__aexit__(None, None, None)
        finally:
            self._free()

    async def _allocate(self, nbytes: int) -> Buffer:
        return await self._arena.lease(nbytes, timeout_s=_ALLOCATE_S)

    def _check(self, able: bool, what: str) -> None:
        if not able:
            raise ConfigError(f"{self.name} cannot {what}")

    def _free(self) -> None:
        self._workers.shutdown()
        self._arena.close()


def _look(look: Look[T], view: memoryview) -> T:
    return look(iter([view]))
