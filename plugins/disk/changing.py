"""Whose file is being written or deleted; nobody else does either meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from lmcache_async.types import ChunkKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator


class ChangingKeys:
    """Keys under change. Used on one loop's thread."""

    def __init__(self) -> None:
        self._ends: dict[ChunkKey, asyncio.Future[None]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._ends

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    async def ended(self, key: ChunkKey) -> None:
        """Wait until nobody changes the key; another may begin at once."""
        if (change := self._ends.get(key)) is not None:
            await asyncio.wait([change])

    @contextlib.asynccontextmanager
    async def alone_with(self, key: ChunkKey) -> AsyncIterator[None]:
        while key in self._ends:
            await self.ended(key)
        with self.change([key]):
            yield

    @contextlib.contextmanager
    def change(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Meanwhile the keys, which nobody changes now, are ours."""
        done = asyncio.get_running_loop().create_future()
        keys = tuple(keys)
        self._ends.update(dict.fromkeys(keys, done))
        try:
            yield
        finally:
            for key in keys:
                del self._ends[key]
            done.set_result(None)
