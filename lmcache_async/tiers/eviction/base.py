"""Interface of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_async.types import ChunkKey


class EvictionPolicy(ABC):
    """Selects the chunks that a full tier deletes.

    A policy orders keys; the tier that owns it moves the bytes. It has no I/O and no clock and is used on one
    thread.

    A chunk is usable only while all chunks before it in its prompt are stored, so a policy evicts a suffix
    before its prefix. It receives keys only, no prompts; `touch` is its only source for their order.
    """

    @abstractmethod
    def add(self, key: ChunkKey, size: int) -> None:
        """Record a chunk that is now stored.

        Args:
            key: The chunk.
            size: Its size, in the unit of the tier (bytes or slabs).

        Raises:
            ValueError: The key is stored already.
        """

    @abstractmethod
    def touch(self, keys: Sequence[ChunkKey], *, gapless: bool = True) -> None:
        """Record the use or lookup of consecutive chunks of one prompt.

        Keys that are not stored count too: a bounded number of their positions is remembered.

        Args:
            keys: Keys in prefix order.
            gapless: False if chunks between two of `keys` may have been left out. The pair is then treated as
                neighbours only if no nearer neighbour is known.
        """

    def touch_each(self, keys: Sequence[ChunkKey]) -> None:
        """Record the use of chunks of one or several prompts, each prompt's in prefix order."""
        for key in reversed(keys):
            self.touch([key])

    @abstractmethod
    def before(self, key: ChunkKey) -> ChunkKey | None:
        """Return the known predecessor of a stored chunk in its prompt; None if it is not known."""

    @abstractmethod
    def discard(self, key: ChunkKey) -> bool:
        """Remove a key that is not stored any more. Return whether it was recorded."""

    @abstractmethod
    def evict(
        self, wanted: int, evictable: Callable[[ChunkKey], bool], *, last_resort: bool = False
    ) -> list[ChunkKey]:
        """Select chunks to delete and remove them from the policy.

        Args:
            wanted: Total size to free, in the unit of `add`.
            evictable: Returns False for a chunk that is in use; such a chunk counts as touched.
            last_resort: If nothing else is left, also select chunks before one that is in use.

        Returns:
            Chunks with a total size of at least `wanted`, in the order of deletion; an empty list if that is
            not possible.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[ChunkKey]:
        """Iterate over the recorded keys, in no order."""
