"""What the tools work on: a place with records, whatever keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

from lmcache_async.memory.buffer import Buffer
from lmcache_async.records.look import Looked
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import ChunkKey

T = TypeVar("T")

Look = Callable[[Iterator[memoryview]], T]
"""Works on a record in pieces, in a worker thread; the first holds all of the header, and each is overwritten
once the next is asked for."""


class Target(ABC):
    """Records that lie somewhere. Opened with `async with`, used on one loop.

    A call that is cancelled has ended when it says so: no thread works on.

    Attributes:
        name: For messages.
        in_flight: How many calls to make at the same time.
        knows_use: Whether `list` knows when records were used, so that age and order of use mean something.
        reads_heads: Whether `head` reads no more than the header.
        holder: The process that has it open beside us, as far as is known; "" for nobody.
    """

    name: str
    in_flight: int
    knows_use = False
    reads_heads = False
    holder = ""

    @abstractmethod
    async def list(self) -> Sequence[Kept]:
        """All records, unread.

        Raises:
            ConfigError: It cannot list what it has.
        """

    @abstractmethod
    async def head(self, kept: Kept) -> Looked | None:
        """What the record says of itself; None when it is gone.

        Raises:
            TierError: It cannot be read.
        """

    @abstractmethod
    async def examine(self, kept: Kept, look: Look[T]) -> T | None:
        """What `look` says of the record; None when it is gone.

        Raises:
            TierError: It cannot be read.
        """

    @abstractmethod
    async def load(self, kept: Kept) -> Buffer | None:
        """The record as it lies there, to be released; it may be longer than its header says. None when it is gone.

        Raises:
            TierError: It cannot be read.
        """

    @abstractmethod
    async def allocate(self, nbytes: int) -> Buffer | None:
        """Memory for a record that is to be saved; None when it is longer than any may be."""

    @abstractmethod
    async def has(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Which of the records are there.

        Raises:
            TierError: It cannot be told.
        """

    async def begin_saves(self) -> None:
        """Before the first `save`: clear what writers that died have left, and see what is there.

        Raises:
            TierError: It cannot be told.
        """

    @abstractmethod
    async def save(self, key: ChunkKey, record: Buffer, stamp: int) -> None:
        """Keep a proven record; it is durable, as far as the place is, once `sync` has returned.

        Raises:
            TierError: It is not kept; TierFullError where there is no room for it.
        """

    @abstractmethod
    async def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Forget records.

        Raises:
            TierError: Some are there still.
        """

    @abstractmethod
    async def set_aside(self, key: ChunkKey, cause: str) -> None:
        """Put a broken record where it is found no more, and somebody can look at it.

        Raises:
            TierError: It is there still.
        """

    @abstractmethod
    async def sync(self) -> None:
        """Make durable what was saved and removed.

        Raises:
            TierError: It may not be durable.
        """

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *error: object) -> None: ...
