"""Tiers of the simulation: one over a faulty backend that outlives the process, and the real disk tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.encryption import is_encrypted
from lmcache_async.tiers.base import Allocate, Capabilities, Tier, TierConfig, TierStatistics
from lmcache_async.types import ChunkKey
from tests.simulation.faults import FaultInjector


class Backend:
    """Storage of a simulated tier. It outlives processes.

    Args:
        injector: Injector of faults.
        max_records: Capacity. The oldest record is evicted first. None for no limit.
        local_index: Whether the tier has a local index of its keys, like a disk and unlike a remote store.
        encrypted: Whether only encrypted records are allowed.
        persistent: Whether the tier declares that its records outlive the process.

    Attributes:
        records: Records by key, oldest first.
        process: Number of the current process. Calls of earlier processes have no effect.
        complaints: Contract violations by callers.
    """

    def __init__(
        self,
        injector: FaultInjector,
        *,
        max_records: int | None,
        local_index: bool,
        encrypted: bool = False,
        persistent: bool = True,
    ) -> None:
        self.injector = injector
        self.max_records = max_records
        self.local_index = local_index
        self.encrypted = encrypted
        self.persistent = persistent
        self.records: dict[ChunkKey, bytes] = {}
        self.process = 0
        self.evictions = 0
        self.complaints: list[str] = []
        self._writing: dict[int, tuple[ChunkKey, bytes]] = {}
        self._writes = 0
        self._recent: list[ChunkKey] = []

    def begin(self, key: ChunkKey, record: bytes) -> int:
        """Start a write and return its number."""
        if self.encrypted and not is_encrypted(memoryview(record)):
            self.complaints.append(f"the record of {key.hex()} came in the clear")
        self._writes += 1
        self._writing[self._writes] = (key, record)
        return self._writes

    def end(self, write: int, *, whole: bool) -> None:
        """End a write. If it was interrupted, a part of the record may be stored."""
        key, record = self._writing.pop(write)
        injector, odds = self.injector, self.injector.odds
        if not whole:
            if injector.draws(odds.torn):
                self._keep(key, _cut(injector, record))
            return
        if injector.draws(odds.lost):
            return
        self._keep(key, _flip(injector, record) if injector.draws(odds.rot) else record)
        self._recent.append(key)

    def crash(self) -> None:
        """End the process. The last records written may be complete, torn or missing."""
        self.process += 1
        for write in list(self._writing):
            self.end(write, whole=self.injector.rng.random() < 0.3)
        for key in self._recent[-8:]:
            if key in self.records and self.injector.draws(self.injector.odds.lost):
                del self.records[key]
            elif key in self.records and self.injector.draws(self.injector.odds.torn / 4):
                self.records[key] = _cut(self.injector, self.records[key])
        self._recent.clear()

    def _keep(self, key: ChunkKey, record: bytes) -> None:
        self.records.pop(key, None)
        self.records[key] = record
        while self.max_records is not None and len(self.records) > self.max_records:
            del self.records[next(iter(self.records))]
            self.evictions += 1


class SimulatedTier(Tier):
    """A tier over a Backend, made by `tier_over`. It works correctly without the faults in `Odds`."""

    backend: Backend

    def __init__(self, config: TierConfig) -> None:
        super().__init__(config)
        self._process = self.backend.process
        self._injector = self.backend.injector

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            persistent=self.backend.persistent,
            removes=True,
            lists=True,
            local_index=self.backend.local_index,
            max_concurrency=2,
        )

    async def contains(self, key: ChunkKey) -> bool:
        await self._arrive("contains")
        return self._has(key)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        await self._arrive("contains_many")
        return [self._has(key) for key in keys]

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        await self._arrive("count_prefix")
        return next((i for i, key in enumerate(keys) if not self._has(key)), len(keys))

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        await self._arrive("get")
        record = self._read(key)
        if record is None:
            return None
        buffer = await allocate(len(record))
        try:
            await self._injector.delay_call()
            buffer.view[:] = record
        except BaseException:
            buffer.release()
            raise
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        await self._arrive("put")
        self._check_lease(key, buffer)
        if self._injector.draws(self._injector.odds.error / 2):
            raise TierFullError("the backend has no room")
        record = bytes(buffer.view)
        write = self.backend.begin(key, record)
        whole = False
        try:
            await self._injector.delay_call()
            self._check_process()
            whole = True
            self._check_lease(key, buffer)
            if bytes(buffer.view) != record:
                self.backend.complaints.append(f"the record of {key.hex()} changed while it was written")
        finally:
            if self._process == self.backend.process:
                self.backend.end(write, whole=whole)

    async def remove(self, key: ChunkKey) -> bool:
        await self._arrive("remove")
        return self.backend.records.pop(key, None) is not None

    async def keys(self) -> AsyncIterator[ChunkKey]:
        await self._arrive("keys")
        for key in list(self.backend.records):
            yield key

    async def clear(self) -> int:
        await self._arrive("clear")
        count = len(self.backend.records)
        self.backend.records.clear()
        return count

    def statistics(self) -> TierStatistics:
        records = self.backend.records
        return TierStatistics(
            chunks=len(records),
            bytes=sum(map(len, records.values())),
            max_bytes=None,
            evictions=self.backend.evictions,
        )

    async def _arrive(self, verb: str) -> None:
        await self._injector.delay_call()
        self._check_process()
        if self._injector.draws(self._injector.odds.error):
            raise _error(self._injector, verb)

    def _check_lease(self, key: ChunkKey, buffer: Buffer) -> None:
        if buffer.released:
            self.backend.complaints.append(f"the lease of {key.hex()} was given back while it was written")

    def _check_process(self) -> None:
        if self._process != self.backend.process:
            raise TierUnavailableError("the process that asks has crashed")

    def _has(self, key: ChunkKey) -> bool:
        return (key in self.backend.records) != self._injector.draws(self._injector.odds.lie)

    def _read(self, key: ChunkKey) -> bytes | None:
        record = self.backend.records.get(key)
        injector = self._injector
        if record is None or not injector.draws(injector.odds.corrupt):
            return record
        damage: Callable[[FaultInjector, bytes], bytes] = injector.rng.choice((_flip, _cut))
        if injector.rng.random() < 0.4:
            return injector.rng.choice(list(self.backend.records.values()))
        return damage(injector, record)


def tier_over(backend: Backend) -> type[SimulatedTier]:
    """Return a tier class whose tiers all store their records in `backend`."""
    members: dict[str, Any] = {"backend": backend}
    return type("TierOverBackend", (SimulatedTier,), members)


def _error(injector: FaultInjector, verb: str) -> Exception:
    kinds = (TierError, TierUnavailableError, OSError, KeyError)
    return injector.rng.choice(kinds)(f"{verb}: injected")


def _flip(injector: FaultInjector, record: bytes) -> bytes:
    damaged = bytearray(record)
    if damaged:
        damaged[injector.rng.randrange(len(damaged))] ^= 1 << injector.rng.randrange(8)
    return bytes(damaged)


def _cut(injector: FaultInjector, record: bytes) -> bytes:
    """Truncate the record, or replace its end by zeros."""
    length = injector.rng.randrange(len(record) + 1)
    return record[:length] + (bytes(len(record) - length) if injector.rng.random() < 0.5 else b"")


class Disk:
    """Makes disk tiers that use the loop's clock, and closes files that a crash leaves open.

    A real crash closes files and releases locks. In the simulation the process continues, so this class does
    it.
    """

    def __init__(self, tier_class: type[Tier]) -> None:
        self._open: list[Any] = []
        self.tier_class = type("SimulatedDiskTier", (_VirtualClock, tier_class), {"disk": self})

    def opened(self, store: Any) -> None:
        """Note an opened tier, and replace its clock, so that timestamps are the same in every run."""
        loop = asyncio.get_running_loop()
        store.index._clock_ns = lambda: int(loop.time() * 1e9)
        self._open.append(store)

    def let_go(self) -> None:
        """Close the files after the end of a process. Unfinished calls of threads have no effect on them."""
        for store in self._open:
            store.close()
        self._open.clear()


class _VirtualClock(Tier):
    """Mixin that precedes a disk tier in the method resolution order."""

    disk: Disk
    _opened: Any

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.disk.opened(self._opened)
        return self
