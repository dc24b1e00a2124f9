"""Offline access to the records of a tier: list, read, write and delete them without an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias, TypeVar

from lmcache_async.errors import ConfigError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer, pages
from lmcache_async.types import ChunkKey

T = TypeVar("T")

Visit: TypeAlias = Callable[[Iterator[memoryview]], T]
"""Processes a record in pieces, in a worker thread. The first piece contains the whole header. A piece is overwritten
when the next one is requested."""


class StoredRecord(NamedTuple):
    """An entry of a listing. A tuple, because a listing may have a hundred thousand entries.

    Attributes:
        nbytes: Size of the file, which may be longer than the record; 0 if it is not known.
        used_ns: Time of the last use in ns since the epoch, less than that of the preceding chunk of its prompt; 0 if it
            is not known.
    """

    key: ChunkKey
    nbytes: int = 0
    used_ns: int = 0

    @property
    def use_order(self) -> tuple[int, ChunkKey]:
        """Sort key, least recently used first; unambiguous where times are equal."""
        return self.used_ns, self.key


class LeftoverFile(NamedTuple):
    """A file of the tier that is not a record: an unfinished write, or a quarantined record."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Options for opening a store.

    Attributes:
        change: Open the store for writing and deleting. A directory is then locked.
        in_flight: Number of concurrent calls.
        max_record_bytes: Maximum size of a record in bytes; memory is allocated for it.
        create: With `change`, create a directory that does not exist. Without, such a directory is empty.
    """

    change: bool
    in_flight: int
    max_record_bytes: int
    create: bool = False

    def make_arena(self, slabs: int) -> Arena:
        """Allocate memory for this number of records.

        Raises:
            ConfigError: It cannot be allocated.
        """
        slab_bytes = pages(self.max_record_bytes)
        try:
            return Arena(slabs * slab_bytes, slab_bytes, huge_pages=False, prefault=False)
        except ConfigError:
            raise ConfigError(
                f"cannot allocate memory for {slabs} records of {slab_bytes} bytes: lower --max-record-bytes or --in-flight"
            ) from None


class OfflineStore(ABC):
    """The records of a tier. Opened with `async with`, used on one event loop.

    A cancelled call ends when its worker thread has finished. Methods raise TierError if the tier fails.

    Attributes:
        name: Name for messages.
        in_flight: Number of calls to make concurrently.
        knows_use: Whether `list` returns sizes and times of use.
        reads_headers: Whether `examine` can read a header without the payload.
        holder: Id of the process that has locked the store; "" if no such process is known.
    """

    name: str
    in_flight: int
    knows_use = False
    reads_headers = False
    holder = ""

    @abstractmethod
    async def list(self) -> Sequence[StoredRecord]:
        """List all records without reading them. Raise ConfigError if the tier cannot list its records."""

    @abstractmethod
    async def examine(self, record: StoredRecord, visit: Visit[T], *, header_only: bool = False) -> T | None:
        """Read a record and return the result of `visit`; None if the record was deleted.

        Args:
            record: The record.
            visit: Called once with the pieces of the record.
            header_only: Only the first piece is needed.
        """

    @abstractmethod
    async def load(self, record: StoredRecord) -> Buffer | None:
        """Read a record into a buffer leased to the caller; None if the record was deleted.

        The buffer may be longer than the record.
        """

    @abstractmethod
    async def allocate(self, nbytes: int) -> Buffer | None:
        """Lease memory for a record to write; None if it exceeds `max_record_bytes`."""

    @abstractmethod
    async def has(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return for each key whether its record is stored."""

    async def prepare_writes(self) -> None:
        """Delete unfinished files of interrupted writers. Called before the first `write`.

        Raises:
            ConfigError: The tier cannot be written to.
        """

    @abstractmethod
    async def write(self, key: ChunkKey, record: Buffer, used_ns: int) -> None:
        """Store a verified record. It is durable, as far as the tier is, after `sync`.

        Raises:
            TierFullError: There is no room.
            TierError: It was not stored, and no part of it is left.
        """

    @abstractmethod
    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete records. A record that does not exist is not an error."""

    @abstractmethod
    async def quarantine(self, key: ChunkKey, cause: str) -> None:
        """Move a damaged record to the quarantine, so that it is not found any more. Delete it if the tier has none."""

    async def leftovers(self) -> tuple[Sequence[LeftoverFile], Sequence[LeftoverFile]]:
        """Return the files of unfinished writes and the quarantined files."""
        return (), ()

    async def delete_files(self, files: Sequence[LeftoverFile]) -> None:
        """Delete files that `leftovers` returned."""

    async def sync(self) -> None:
        """Make all writes and deletions durable. By default they are when their call returns."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *error: object) -> None: ...
