"""Publishes chunk events (stored, removed) of a tier to a watcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.base import TierLayer
from lmcache_async.types import ChunkKey


class Watcher(Protocol):
    """Subscriber of chunk events. Called on the loop's thread; must be quick and must not raise."""

    def kept(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """The tier has stored the chunks. It may have had them before.

        Args:
            tier: Tier id.
            keys: Keys of the chunks.
        """

    def gone(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        """The tier does not have the chunks any more. It may not have had all of them.

        Args:
            tier: Tier id.
            keys: Keys of the chunks.
        """


class NoticeLayer(TierLayer):
    """Publishes the writes, removals and evictions of a tier; changes nothing.

    Deletions by a shared backend itself are not visible here and not published. The layer is only added if
    there is a watcher.

    Args:
        inner: The tier with its `BorderLayer`, without other layers.
        name: Tier id.
        watcher: Receives the events.
    """

    def __init__(self, inner: Tier, name: str, watcher: Watcher) -> None:
        super().__init__(inner)
        self._name = name
        self._watcher = watcher
        tier = inner
        while isinstance(tier, TierLayer):
            tier = tier.inner
        tier.on_evicted = self._gone

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self.inner.put(key, buffer)
        self._watcher.kept(self._name, (key,))

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        errors = await self.inner.put_many(items)
        kept = [key for (key, _), error in zip(items, errors, strict=False) if error is None]
        if kept:
            self._watcher.kept(self._name, kept)
        return errors

    async def remove(self, key: ChunkKey) -> bool:
        removed = await self.inner.remove(key)
        self._gone((key,))
        return removed

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        rejected = await self.inner.reject(key, cause)
        self._gone((key,))
        return rejected

    async def clear(self) -> int:
        there = [key async for key in self.keys()]
        removed = await self.inner.clear()
        self._gone(there)
        return removed

    def _gone(self, keys: Sequence[ChunkKey]) -> None:
        if keys:
            self._watcher.gone(self._name, keys)
