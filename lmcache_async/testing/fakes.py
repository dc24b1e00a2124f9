"""Tiers for tests, which pass the conformance suite themselves: a dict, a gate, a slow one, one that fails as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from lmcache_async.config.values import OptionalSize
from lmcache_async.errors import TierError, TierFullError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.faults import Fault, FaultPlan, FaultyTier, unavailable
from lmcache_async.tiers.base import Allocate, Capabilities, Tier, TierConfig, TierStatistics
from lmcache_async.tiers.eviction import LRUPolicy
from lmcache_async.tiers.layers.base import TierLayer
from lmcache_async.types import ChunkKey

__all__ = [
    "DictConfig",
    "DictTier",
    "Fault",
    "FaultPlan",
    "FaultyTier",
    "GatedTier",
    "LatencyTier",
    "unavailable",
]


class DictConfig(TierConfig):
    """Options of a DictTier.

    Attributes:
        max_bytes: Most bytes of all records; no limit by default.
    """

    max_bytes: OptionalSize = None


class DictTier(Tier):
    """Keeps copies of records in a dict: the smallest honest tier, and the model for others.

    With a limit it gives up what is least recently used, suffixes before their prefixes.

    Args:
        config: A DictConfig, or any other; its `max_bytes` counts if it has one.
        records: Where the records are kept. A dict given outlives the tier, which calls itself persistent.
    """

    config_type = DictConfig

    def __init__(
        self, config: TierConfig | None = None, *, records: dict[ChunkKey, bytes] | None = None
    ) -> None:
        super().__init__(config or DictConfig())
        self.records = {} if records is None else records
        self._persistent = records is not None
        self._max_bytes: int | None = getattr(self.config, "max_bytes", None)
        self._policy = LRUPolicy()
        self._evictions = 0
        for key, record in self.records.items():
            self._policy.add(key, len(record))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=self._persistent, removes=True, lists=True, local_index=True)

    async def contains(self, key: ChunkKey) -> bool:
        return key in self.records

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._policy.touch(keys, gapless=False)
        return await super().contains_many(keys)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        record = self.records.get(key)
        if record is None:
            return None
        self._policy.touch([key])
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        if self._max_bytes is not None:
            self._make_room(key, buffer.nbytes, self._max_bytes)
        self.records[key] = bytes(buffer.view)

    async def remove(self, key: ChunkKey) -> bool:
        self._policy.discard(key)
        return self.records.pop(key, None) is not None

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in list(self.records):
            yield key

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            chunks=len(self.records),
            bytes=sum(map(len, self.records.values())),
            max_bytes=self._max_bytes,
            evictions=self._evictions,
        )

    def _make_room(self, key: ChunkKey, nbytes: int, max_bytes: int) -> None:
        self._policy.discard(key)
        self._policy.add(key, nbytes)  # before others go, so that none of what it continues does
        self._policy.touch([key])
        used = sum(len(record) for other, record in self.records.items() if other != key)
        victims = self._policy.evict(used + nbytes - max_bytes, lambda other: other != key)
        if not victims and used + nbytes > max_bytes:
            self._policy.discard(key)
            self.records.pop(key, None)
            raise TierFullError(f"a record of {nbytes} bytes finds no room among {max_bytes}")
        self._evictions += len(victims)
        for victim in victims:
            del self.records[victim]


class GatedTier(TierLayer):
    """Parks every `get` and `put` until the test opens the gate, which is closed to begin with.

    Attributes:
        parked: Set once a call is parked.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.parked = asyncio.Event()
        self._gate = asyncio.Event()

    def open_gate(self) -> None:
        self._gate.set()

    def close_gate(self) -> None:
        """Park calls from now on; `parked` is a new event."""
        self.parked = asyncio.Event()
        self._gate = asyncio.Event()

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
        if not self._gate.is_set():
            self.parked.set()
        await self._gate.wait()


class LatencyTier(TierLayer):
    """Answers late: a call, also one of a batch, takes `latency_s` and the time of its bytes.

    Time is the running loop's, so a loop with virtual time makes it free.

    Args:
        inner: The tier.
        latency_s: Seconds of each call.
        bytes_per_s: How fast records go through; None for at once.
    """

    def __init__(self, inner: Tier, *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s

    async def contains(self, key: ChunkKey) -> bool:
        await self._wait(0)
        return await self.inner.contains(key)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._wait(0)
        return await self.inner.contains_many(keys)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        await self._wait(0)
        return await self.inner.count_prefix(keys)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        buffer = await self.inner.get(key, allocate)
        await self._arrive([buffer])
        return buffer

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        results = await self.inner.get_many(keys, allocate)
        await self._arrive(results)
        return results

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self._wait(buffer.nbytes)
        await self.inner.put(key, buffer)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        await self._wait(sum(buffer.nbytes for _, buffer in items))
        return await self.inner.put_many(items)

    async def remove(self, key: ChunkKey) -> bool:
        await self._wait(0)
        return await self.inner.remove(key)

    async def _wait(self, nbytes: int) -> None:
        transfer_s = nbytes / self._bytes_per_s if self._bytes_per_s else 0.0
        await asyncio.sleep(self._latency_s + transfer_s)

    async def _arrive(self, results: Sequence[Buffer | TierError | None]) -> None:
        buffers = [result for result in results if isinstance(result, Buffer)]
        try:
            await self._wait(sum(buffer.nbytes for buffer in buffers))
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
