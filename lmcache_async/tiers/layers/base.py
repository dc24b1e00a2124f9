"""A layer is a tier around a tier: it passes every verb on, and changes the few that it is about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierStatistics
from lmcache_async.types import ChunkKey


class TierLayer(Tier):
    """Forwards everything to the tier inside."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner.config)
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def bind(self, arena: Arena) -> None:
        self.inner.bind(arena)

    async def contains(self, key: ChunkKey) -> bool:
        return await self.inner.contains(key)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return await self.inner.get(key, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self.inner.put(key, buffer)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self.inner.count_prefix(keys)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self.inner.contains_many(keys)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await self.inner.get_many(keys, allocate)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        return await self.inner.put_many(items)

    async def remove(self, key: ChunkKey) -> bool:
        return await self.inner.remove(key)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self.inner.reject(key, cause)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        return await self.inner.scrub(max_bytes_per_s=max_bytes_per_s)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        async for key in self.inner.keys():
            yield key

    async def clear(self) -> int:
        return await self.inner.clear()

    def statistics(self) -> TierStatistics:
        return self.inner.statistics()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, trace)
