"""What a tier has left where it lies, for tools that look at it from outside of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from lmcache_async.tiers.base import Tier, TierConfig
from lmcache_async.types import ChunkKey


class Kept(NamedTuple):
    """A record as it lies there, unread; of a hundred thousand, so it is a tuple.

    Attributes:
        nbytes: Of what holds it, which may be longer than the record; 0 where that is not known.
        stamp: When it was last used, in ns since the epoch, less than that of the chunk that it continues;
            0 where that is not known.
    """

    key: ChunkKey
    nbytes: int = 0
    stamp: int = 0

    @property
    def rank(self) -> tuple[int, ChunkKey]:
        """What to sort by, the least recently used first: the same order each time, also where stamps are equal."""
        return self.stamp, self.key


class Litter(NamedTuple):
    """A file that is no record: one half written, or one put aside as broken."""

    name: str
    nbytes: int


class AtRest(ABC):
    """Records that lie somewhere whether or not a process has them open. Blocking; run in threads.

    Reading needs no hold: a record is there as a whole or not at all, also while an engine writes and
    evicts beside it. To change anything takes the hold that the tier itself has while it is open.

    Attributes:
        place: Where they lie.
        holder: The process that has the hold, as far as it says so; "" for nobody.
    """

    place: Path

    @abstractmethod
    def look(self) -> None:
        """Open to read; nothing is made or changed.

        Raises:
            TierUnavailableError: It is not there or cannot be read.
        """

    @abstractmethod
    def hold(self) -> None:
        """Open to change, alone.

        Raises:
            TierUnavailableError: Somebody else has it, or it cannot be made.
        """

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def holder(self) -> str: ...

    @abstractmethod
    def list(self) -> Sequence[Kept]:
        """All records, unread."""

    @abstractmethod
    def read(self, key: ChunkKey, view: memoryview, offset: int = 0) -> int | None:
        """Fill `view`, page-aligned and of whole pages, from the record's `offset` on.

        How many bytes there were; None when the record is not there any more.

        Raises:
            OSError: It cannot be read.
        """

    @abstractmethod
    def write(self, key: ChunkKey, view: memoryview, stamp: int) -> None:
        """Publish a record of whole pages; it survives a power failure once `sync` has returned.

        Raises:
            OSError: It was not written, and nothing of it is left.
        """

    @abstractmethod
    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete records; those that are gone already are no error.

        Raises:
            OSError: One could not be deleted; those before it are.
        """

    @abstractmethod
    def set_aside(self, key: ChunkKey, cause: str) -> None:
        """Move a broken record to where it is found no more and somebody can look at it.

        Raises:
            OSError: It could not be moved.
        """

    @abstractmethod
    def litter(self) -> tuple[Sequence[Litter], Sequence[Litter]]:
        """Files half written, and those that were put aside."""

    @abstractmethod
    def sweep(self, litter: Sequence[Litter]) -> None:
        """Delete these.

        Raises:
            OSError: One could not be deleted; those before it are.
        """

    @abstractmethod
    def sync(self) -> None:
        """What was written, removed and moved is durable when this returns.

        Raises:
            OSError: It may not be.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def at_rest_of(tier_class: type[Tier], config: TierConfig) -> AtRest | None:
    """The records of a tier that can be looked at without opening it: its class has `at_rest(config)`."""
    make = getattr(tier_class, "at_rest", None)
    if make is None:
        return None
    rest = make(config)
    assert isinstance(rest, AtRest), f"{tier_class.__name__}.at_rest gave {rest!r}"
    return rest
