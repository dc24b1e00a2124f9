"""Interface of tiers: three abstract coroutines, with default implementations for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeAlias

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypeVar  # defaults of type variables are in typing from Python 3.13

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.diagnosis import Check
from lmcache_async.tiers.offline import OfflineOptions, OfflineStore
from lmcache_async.tiers.results import call_each, check_flag
from lmcache_async.types import ChunkKey

Allocate: TypeAlias = Callable[[int], Awaitable[Buffer]]
"""`await allocate(nbytes)` returns a `Buffer` of that length; it raises BudgetExceededError if no memory is
free in time."""


class TierConfig(BaseModel):
    """Options of a tier, checked at start-up; a tier's own config derives from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def for_process(self, *, rank: int | None, replica: int = 0) -> Self:
        """Return the options of one process of several, if each needs its own, such as a directory.

        The default returns these options: all processes share the tier's store.

        Args:
            rank: Rank of the process; None if there is only one.
            replica: Number of the data-parallel replica. Replica 0 has the options of an engine without replicas,
                and so keeps its records when replicas are added.
        """
        del rank, replica
        return self


ConfigT = TypeVar("ConfigT", bound=TierConfig, default=Any)
"""Config type of a tier. With `class MyTier(Tier)`, without a parameter, `config` is not type-checked."""


class Medium(StrEnum):
    """Where a tier stores records, as reported by KV events and hit statistics."""

    MEMORY = "memory"
    """Memory of this host."""
    DISK = "disk"
    """A disk of this host."""
    REMOTE = "remote"
    """Anywhere else."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional features of a tier. The conformance suite selects its cases by them.

    Attributes:
        in_arena: `get` returns leases of arena slabs without a copy, and `put` keeps a lease.
        own_memory: `get` returns leases of the tier's own memory instead of memory of `allocate`. The memory
            is shared with other readers (`Buffer.shared`) and must not be written to.
        writes: `put` is implemented. A tier without this capability is read-only: chunks that it does not have
            do not count as missing.
        persistent: Content outlives the process.
        removes: `remove` is implemented.
        lists: `keys` is implemented.
        local_index: `contains` is answered from memory of this process, so a lookup of every key is cheap.
        shared: Other processes, including those on other hosts, find a chunk as soon as `put` has returned.
        max_concurrency: Number of chunks that the default batch methods transfer concurrently.
        medium: Where the tier stores records.
    """

    in_arena: bool = False
    own_memory: bool = False
    writes: bool = True
    persistent: bool = False
    removes: bool = False
    lists: bool = False
    local_index: bool = False
    shared: bool = False
    max_concurrency: int = 4
    medium: Medium = Medium.REMOTE


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Content of a tier.

    Attributes:
        chunks: Number of records.
        bytes: Bytes that count against `max_bytes`.
        max_bytes: Capacity in bytes; None if the tier cannot determine it.
        evictions: Records evicted since the tier was opened.
        corrupt: Corrupt records that the tier itself detected since it was opened. Each was a miss and is not
            found any more.
        corrupt_by_cause: `corrupt` by cause; see `ChunkCorruptError`.
        common: Chunks, bytes, capacity and evictions are those of a store with several writers. Every writer
            reports the same values, so they must not be summed.
    """

    chunks: int = 0
    bytes: int = 0
    max_bytes: int | None = None
    evictions: int = 0
    corrupt: int = 0
    corrupt_by_cause: Mapping[str, int] = field(default_factory=dict)
    common: bool = False


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """Result of a scrub.

    Attributes:
        chunks: Records read and verified.
        bytes: Bytes of these records and of the corrupt ones.
        corrupt: Number of corrupt records by cause.
        errors: Records that could not be read; they may be intact.
    """

    chunks: int = 0
    bytes: int = 0
    corrupt: Mapping[str, int] = field(default_factory=dict)
    errors: int = 0


class Tier(ABC, Generic[ConfigT]):
    """A store of chunks by key.

    The bytes of a buffer are one sealed record. A tier stores and returns them unchanged and need not parse
    them. Calls may overlap. A chunk is immutable: a second `put` of a key stores the same content, and either
    copy may be kept. Every coroutine is a cancellation point. A cancelled call must not access the caller's
    buffer after it has ended, nor keep a lease that it took.

    A buffer belongs to the call that received it. Buffers from `allocate` that `get` does not return are
    released when the call ends, whatever the reason; a call may hold at most two per key. The buffer passed
    to `put` is read-only and valid until the call ends. To use its bytes for longer, copy them, or take a
    further lease with `buffer.retain()`, which is also read-only. A tier may release the buffers that it
    received but does not have to.

    Args:
        config: Options of the tier, an instance of `config_type`.

    Attributes:
        config_type: Config class, which validates the options of the tier.
    """

    config_type: ClassVar[type[TierConfig]] = TierConfig

    on_evicted: Callable[[Sequence[ChunkKey]], None] | None = None
    """Callback for removals by the tier itself. Set before the tier is opened; the tier calls it with the keys that it
    evicts, or drops because their records are corrupt or missing, on the thread of the event loop."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @classmethod
    def offline(cls, config: ConfigT, options: OfflineOptions) -> OfflineStore | None:
        """Return access to the tier's records without opening the tier, for the maintenance commands.

        The default is None: the commands open the tier and use its `keys`, `get`, `put` and `remove`. A tier
        whose records are files can return a store that reads them while an engine has the tier open.

        Args:
            config: Options of the tier.
            options: Options of the store.
        """
        del config, options
        return None

    @classmethod
    def directory_config(cls, path: Path) -> ConfigT | None:
        """Return the config of a tier whose records are files in a directory, for commands with only a path.

        The default is None: the tier does not keep records in a directory.

        Args:
            path: The directory.
        """
        del path
        return None

    @abstractmethod
    async def contains(self, key: ChunkKey) -> bool:
        """Return whether `get` would find the chunk now.

        Raises:
            TierError: The backend failed. The caller counts it as a miss.
        """

    @abstractmethod
    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        """Return the chunk in a buffer of `allocate`, leased to the caller; None on a miss.

        A tier with `in_arena` or `own_memory` in its `capabilities` returns a lease of that memory instead.

        Args:
            key: The chunk.
            allocate: Leases memory for the record; see `Allocate`.

        Raises:
            TierError: The backend failed. The caller counts it as a miss.
            BudgetExceededError: `allocate` found no free memory in time.
        """

    @abstractmethod
    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        """Store the bytes of `buffer.view` under `key`. They are visible when the call returns.

        Args:
            key: The chunk.
            buffer: The record; read-only, valid until the call ends.

        Raises:
            TierError: The chunk was not stored. The caller counts a drop.
        """

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def diagnose(self, *, sample_bytes: int | None = None) -> Iterable[Check]:
        """Check what the tier needs on this machine, for `lmcache-async doctor`. The default checks nothing.

        Called in a thread before the tier is opened, possibly while an engine uses the same backend, so it may
        block and must not change stored records. `doctor` itself opens every tier that is neither in the arena
        nor on a disk of this host, and stores and removes a small record.

        Args:
            sample_bytes: Number of bytes to write and read to measure a medium; None to measure nothing.
        """
        del sample_bytes
        return ()

    def bind(self, arena: Arena) -> None:
        """Prepare the tier for an arena. Called once before the tier is opened.

        A tier that keeps leases adds a reclaimer to the arena here. A tier whose transport needs registered
        memory registers the region of the arena.
        """

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the length of the longest prefix of `keys` that is stored."""
        for count, key in enumerate(keys):
            if not check_flag("contains", await self.contains(key)):
                return count
        return len(keys)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each key whether `get` would find the chunk now.

        Called for tiers with a `local_index`, and for lookups that must cover all keys, not only a prefix.
        """
        return [check_flag("contains", await self.contains(key)) for key in keys]

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """Call `get` for each key; the results are in the order of `keys`.

        If the call is cancelled, all buffers read so far are released before it ends.

        Returns:
            For each key a buffer leased to the caller, None on a miss, or the error of that chunk.
        """
        return await call_each(
            "get", keys, lambda key: self.get(key, allocate), self.capabilities.max_concurrency
        )

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        """Call `put` for each item; the results are in the order of `items`.

        Returns:
            For each item None if it was stored, else the error.
        """
        return await call_each("put", items, lambda item: self.put(*item), self.capabilities.max_concurrency)

    async def remove(self, key: ChunkKey) -> bool:
        """Delete the chunk. Return whether it was stored; False if the tier does not support removal."""
        del key
        return False

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """Make a record that failed verification unreadable. Return whether it was stored.

        The default deletes it. A tier with a quarantine moves it there.

        Args:
            key: Key of the record.
            cause: Cause of the failure; see `ChunkCorruptError`.
        """
        del cause
        return await self.remove(key)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        """Read and verify every record, and reject corrupt ones.

        A scrub may take long and has no deadline. It can be cancelled at any time. The default verifies
        nothing and returns an empty report.

        Args:
            max_bytes_per_s: Maximum read rate in bytes per second; None for no limit.
        """
        del max_bytes_per_s
        return ScrubReport()

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """Iterate over all stored keys, in no order. Empty if `lists` is not in the capabilities."""
        nothing: tuple[ChunkKey, ...] = ()
        for key in nothing:
            yield key

    async def clear(self) -> int:
        """Remove every chunk that `keys` lists. Return the number of removed chunks."""
        removed = 0
        for key in [key async for key in self.keys()]:
            removed += check_flag("remove", await self.remove(key))
        return removed

    def lacks(self, key: ChunkKey) -> bool:
        """Return whether the chunk is known not to be stored now. The default is False: unknown.

        Like `count_in_memory`, it may be called from any thread and concurrently with other methods, and must not block.
        A tier with a `local_index` can answer from the index; vLLM then need not wait for the lookup of a new prompt.
        """
        del key
        return False

    def count_in_memory(self, keys: Sequence[ChunkKey]) -> int | None:
        """Count the leading keys that a tier with the capability `in_arena` has now. The default is None: unknown.

        Unlike `count_prefix`, it may be called from any thread and concurrently with other methods, and must not block.
        An eviction policy should treat it as a lookup. The result may be outdated when the caller uses it.
        """
        del keys
        return None

    def statistics(self) -> TierStatistics:
        return TierStatistics()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the tier. The content of a persistent tier is kept."""
