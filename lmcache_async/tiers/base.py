"""The tier contract: three coroutines to write, working defaults for the rest."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeAlias

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypeVar  # typing's own has no default before Python 3.13

from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.answers import reads, settle, settle_put
from lmcache_async.tiers.border import flag
from lmcache_async.tiers.offline import OfflineOptions, OfflineStore
from lmcache_async.types import ChunkKey

Allocate: TypeAlias = Callable[[int], Awaitable[Buffer]]
"""`await allocate(nbytes)` gives a `Buffer` of that length; BudgetExceededError when there is no room in time."""


class TierConfig(BaseModel):
    """Options of a tier, checked at start-up; a tier's own config derives from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


ConfigT = TypeVar("ConfigT", bound=TierConfig, default=Any)
"""A tier's own config type. `class MyTier(Tier)` without one is a tier whose `config` is not checked for types."""


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
    """What a tier can do beyond the three verbs; the conformance suite picks its cases by it.

    Attributes:
        in_arena: `get` gives leases of the arena itself, without a copy, and `put` keeps one.
        own_memory: `get` gives leases of memory that is the tier's own and not of `allocate`'s. Others read
            it too (`Buffer.shared`), so nobody writes to it.
        writes: `put` is implemented. What only reads is given nothing, and lacks nothing.
        persistent: Content outlives the process.
        removes: `remove` is implemented.
        lists: `keys` is implemented.
        local_index: `contains` answers from this process's memory, so asking for every key is cheap.
        shared: Other processes find what this one has put, as soon as `put` has returned.
        max_concurrency: How many chunks the default batch verbs move at the same time.
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
    """What a tier holds.

    Attributes:
        chunks: Records held.
        bytes: Bytes that count against `max_bytes`.
        max_bytes: The capacity; None where the backend alone knows.
        evictions: Records given up for room since the tier was opened.
        corrupt: Records that the tier itself found broken, since it was opened; each was a miss and is
            no hit any more.
        corrupt_by_cause: The same by cause; see `ChunkCorruptError`.
        common: Chunks, bytes, capacity and evictions are of a store that others write to as well. Each of them is
            told the same, so nobody adds them up.
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
    """What a scrub came to.

    Attributes:
        chunks: Records read and proven.
        bytes: Their bytes, with those found broken.
        corrupt: Records found broken, by cause.
        errors: Records that could not be read; they may be right.
    """

    chunks: int = 0
    bytes: int = 0
    corrupt: Mapping[str, int] = field(default_factory=dict)
    errors: int = 0


class Tier(ABC, Generic[ConfigT]):
    """A place that keeps chunks by key.

    A buffer's bytes are one sealed record; a tier stores and returns them as they are and need not
    look inside. Calls may overlap. A chunk is immutable: a second `put` of a key stores the same
    content, and either copy may stay. Every coroutine is a cancellation point; once cancelled it
    touches the caller's buffer no more and holds no lease of its own making.

    Buffers belong to the call they were given to. Those of `allocate` that `get` does not return are
    released when it ends, however it ends, and a call may hold two for each key. The buffer given to
    `put` is read-only and ends with the call; a tier that wants the bytes for longer takes a lease of
    its own (`buffer.retain()`), which is read-only too, or copies them. A tier may release what it was
    given, and need not.
    """

    config_type: ClassVar[type[TierConfig]] = TierConfig

    on_evicted: Callable[[Sequence[ChunkKey]], None] | None = None
    """Set by who wants to know, before it is opened: to be called with the keys that the tier gives up for room."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @classmethod
    def offline(cls, config: ConfigT, options: OfflineOptions) -> OfflineStore | None:
        """Access to the tier's records without opening the tier, for the maintenance commands.

        The default is None: the commands open the tier and use its `keys`, `get`, `put` and `remove`. A tier whose
        records are files can return a store that reads them while an engine has the tier open.
        """
        del config, options
        return None

    @classmethod
    def directory_config(cls, path: Path) -> ConfigT | None:
        """The config of a tier whose records are files in this directory, where a command is given only its path.

        The default is None: the tier does not keep records in a directory.
        """
        del path
        return None

    @abstractmethod
    async def contains(self, key: ChunkKey) -> bool:
        """Whether `get` would find the chunk now.

        Raises:
            TierError: The backend failed. The caller counts it as a miss.
        """

    @abstractmethod
    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        """The chunk in a buffer of `allocate`'s, leased to the caller; None on a miss.

        A tier with memory of its own, as its `capabilities` say, gives a lease of that.

        Raises:
            TierError: The backend failed. The caller counts it as a miss.
            BudgetExceededError: `allocate` found no room in time.
        """

    @abstractmethod
    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        """Keep the bytes of `buffer.view` under `key`. They are visible when the call returns.

        Raises:
            TierError: The chunk was not stored. The caller counts a drop.
        """

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def bind(self, arena: Arena) -> None:
        """Called once before the tier is opened.

        A tier that keeps leases adds a reclaimer to the arena here; one whose transport wants
        registered memory registers the arena's region.
        """

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading keys are there: the length of the longest run from the first on."""
        for count, key in enumerate(keys):
            if not flag("contains", await self.contains(key)):
                return count
        return len(keys)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """`contains` for each key, in order. Asked only of tiers with a `local_index`."""
        return [flag("contains", await self.contains(key)) for key in keys]

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """`get` for each key, in order; a failure is a value in its place.

        Cancelled, it gives back every buffer it has got before it ends.
        """
        limit = asyncio.Semaphore(self.capabilities.max_concurrency)
        with reads(len(keys)) as results:

            async def one(index: int, key: ChunkKey) -> None:
                async with limit:
                    await settle(results, index, self.get(key, allocate))

            async with asyncio.TaskGroup() as group:
                for index, key in enumerate(keys):
                    group.create_task(one(index, key))
        return results

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        """`put` for each item, in order; None where it was stored, else why not."""
        limit = asyncio.Semaphore(self.capabilities.max_concurrency)
        results: list[TierError | None] = [None] * len(items)

        async def one(index: int, key: ChunkKey, buffer: Buffer) -> None:
            async with limit:
                await settle_put(results, index, self.put(key, buffer))

        async with asyncio.TaskGroup() as group:
            for index, (key, buffer) in enumerate(items):
                group.create_task(one(index, key, buffer))
        return results

    async def remove(self, key: ChunkKey) -> bool:
        """Forget the chunk; whether it was there. A tier that cannot remove answers False."""
        del key
        return False

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        """A record that `get` gave was proven wrong: never give it again; whether it was there.

        The default removes it. A tier that keeps such records for somebody to look at puts it aside.

        Args:
            key: The record's.
            cause: Of the doubt; see `ChunkCorruptError`.
        """
        del cause
        return await self.remove(key)

    async def scrub(self, *, max_bytes_per_s: int | None = None) -> ScrubReport:
        """Read every record, prove it and reject what is broken; at most at that rate.

        It is not meant to end soon, so nothing puts a deadline around it; cancel it at any time. A tier
        that cannot do it reports nothing.
        """
        del max_bytes_per_s
        return ScrubReport()

    async def keys(self) -> AsyncIterator[ChunkKey]:
        """All keys held, in no order. A tier that cannot list gives none; see `capabilities`."""
        nothing: tuple[ChunkKey, ...] = ()
        for key in nothing:
            yield key

    async def clear(self) -> int:
        """Remove every chunk that `keys` lists; how many there were."""
        removed = 0
        for key in [key async for key in self.keys()]:
            removed += flag("remove", await self.remove(key))
        return removed

    def statistics(self) -> TierStatistics:
        return TierStatistics()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. Content of a persistent tier stays."""
