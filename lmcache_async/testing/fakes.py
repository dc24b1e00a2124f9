"""Tiers for tests: a dict, one that parks where a test wants it, one that fails as told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate, Capabilities, Tier, TierConfig, TierStatistics
from lmcache_async.tiers.layers.base import TierLayer
from lmcache_async.types import ChunkKey


class DictTier(Tier):
    """Keeps copies of records in a dict: the smallest honest tier, and the model for others."""

    def __init__(self, config: TierConfig | None = None) -> None:
        super().__init__(config or TierConfig())
        self.records: dict[ChunkKey, bytes] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(removes=True, lists=True, local_index=True)

    async def contains(self, key: ChunkKey) -> bool:
        return key in self.records

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        record = self.records.get(key)
        if record is None:
            return None
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        self.records[key] = bytes(buffer.view)

    async def remove(self, key: ChunkKey) -> bool:
        return self.records.pop(key, None) is not None

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in list(self.records):
            yield key

    def statistics(self) -> TierStatistics:
        return TierStatistics(chunks=len(self.records), bytes=sum(map(len, self.records.values())))


class GatedTier(TierLayer):
    """Parks every `get` and `put` until the test opens the gate.

    Attributes:
        parked: Set while a call is parked.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.parked = asyncio.Event()
        self._gate = asyncio.Event()

    def open_gate(self) -> None:
        self._gate.set()

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        await self._park()
        return await self.inner.get(key, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self._park()
        await self.inner.put(key, buffer)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await Tier.get_many(self, keys, allocate)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        return await Tier.put_many(self, items)

    async def _park(self) -> None:
        self.parked.set()
        await self._gate.wait()


class FaultyTier(TierLayer):
    """Raises the errors it is given, one a call, first in first out; then works.

    Attributes:
        faults: What the next calls of any verb raise; None lets a call through.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.faults: deque[Exception | None] = deque()

    async def contains(self, key: ChunkKey) -> bool:
        self._fail()
        return await self.inner.contains(key)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        self._fail()
        return await self.inner.get(key, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        self._fail()
        await self.inner.put(key, buffer)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await Tier.contains_many(self, keys)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await Tier.get_many(self, keys, allocate)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        return await Tier.put_many(self, items)

    def _fail(self) -> None:
        if self.faults:
            fault = self.faults.popleft()
            if fault is not None:
                raise fault


def unavailable() -> TierError:
    """An error such as a tier's backend gives."""
    return TierError("the backend is away")
