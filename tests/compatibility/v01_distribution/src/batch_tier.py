"""A tier that overrides what 0.1's documentation says may be overridden."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from lmcache_async import (
    Allocate,
    BudgetExceededError,
    Buffer,
    Capabilities,
    ChunkKey,
    ScrubReport,
    Tier,
    TierConfig,
    TierError,
    TierFullError,
    TierStatistics,
)
from lmcache_async.config import Size
from lmcache_async.memory.arena import Arena
from lmcache_async.tiers.rest import AtRest, Kept, Litter


class BatchConfig(TierConfig):
    max_bytes: Size = 1 << 40
    store: str = ""


class BatchTier(Tier):
    """Records in a dict, in whole batches; it evicts the least recently used one."""

    config_type = BatchConfig
    calls: ClassVar[list[str]] = []
    stores: ClassVar[dict[str, OrderedDict[ChunkKey, bytes]]] = {}

    def __init__(self, config: BatchConfig) -> None:
        super().__init__(config)
        self._records: OrderedDict[ChunkKey, bytes] = OrderedDict()
        if config.store:
            self._records = self.stores.setdefault(config.store, self._records)
        self._evictions = 0
        self.arena: Arena | None = None

    @property
    def capabilities(self) -> Capabilities:
        persistent = bool(self.config.store)
        return Capabilities(
            persistent=persistent, removes=True, lists=True, local_index=True, max_concurrency=2
        )

    def bind(self, arena: Arena) -> None:
        self.arena = arena

    async def contains(self, key: ChunkKey) -> bool:
        return key in self._records

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        self.calls.append("get")
        (found,) = await self.get_many([key], allocate)
        if isinstance(found, TierError):
            raise found
        return found

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        self.calls.append("put")
        (error,) = await self.put_many([(key, buffer)])
        if error is not None:
            raise error

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        self.calls.append("count_prefix")
        return next((index for index, key in enumerate(keys) if key not in self._records), len(keys))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self.calls.append("contains_many")
        return [key in self._records for key in keys]

    async def get_many(
        self, keys: Sequence[ChunkKey], allocate: Allocate
    ) -> list[Buffer | TierError | None]:
        self.calls.append("get_many")
        found: list[Buffer | TierError | None] = []
        try:
            for key in keys:
                record = self._records.get(key)
                if record is None:
                    found.append(None)
                    continue
                try:
                    buffer = await allocate(len(record))
                except BudgetExceededError as error:
                    found.append(TierError(f"no memory: {error}"))
                    continue
                buffer.view[:] = record
                found.append(buffer)
                if key in self._records:
                    self._records.move_to_end(key)
        except BaseException:
            for each in found:
                if isinstance(each, Buffer):
                    each.release()
            raise
        return found

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        self.calls.append("put_many")
        results: list[TierError | None] = []
        for key, buffer in items:
            if len(buffer.view) > self.config.max_bytes:
                results.append(TierFullError(f"a record of {len(buffer.view)} bytes is too long"))
                continue
            self._records[key] = bytes(buffer.view)
            self._records.move_to_end(key)
            self._make_room()
            results.append(None)
        return results

    def _make_room(self) -> None:
        evicted = []
        while sum(map(len, self._records.values())) > self.config.max_bytes:
            evicted.append(self._records.popitem(last=False)[0])
        self._evictions += len(evicted)
        if evicted and self.on_evicted is not None:
            self.on_evicted(evicted)

    async def remove(self, key: ChunkKey) -> bool:
        return self._records.pop(key, None) is not None

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        self.calls.append(f"reject {cause}")
        return await self.remove(key)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        return ScrubReport(chunks=len(self._records))

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in list(self._records):
            yield key

    async def clear(self) -> int:
        removed = len(self._records)
        self._records.clear()
        return removed

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            chunks=len(self._records),
            bytes=sum(map(len, self._records.values())),
            max_bytes=self.config.max_bytes,
            evictions=self._evictions,
        )

    @classmethod
    def at_rest(cls, config: BatchConfig) -> AtRest:
        return NothingAtRest()


class NothingAtRest(AtRest):
    """What 0.1's commands on records could read beside a running engine."""

    place = Path()

    def look(self) -> None: ...

    def hold(self) -> None: ...

    def close(self) -> None: ...

    @property
    def holder(self) -> str:
        return ""

    def list(self) -> Sequence[Kept]:
        return []

    def read(self, key: ChunkKey, view: memoryview, offset: int = 0) -> int | None:
        return None

    def write(self, key: ChunkKey, view: memoryview, stamp: int) -> None: ...

    def remove(self, keys: Sequence[ChunkKey]) -> None: ...

    def set_aside(self, key: ChunkKey, cause: str) -> None: ...

    def litter(self) -> tuple[Sequence[Litter], Sequence[Litter]]:
        return (), ()

    def sweep(self, litter: Sequence[Litter]) -> None: ...

    def sync(self) -> None: ...
