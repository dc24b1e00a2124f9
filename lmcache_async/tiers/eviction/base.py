"""The eviction policy's contract: it orders keys, the tier that owns it moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_async.types import ChunkKey


class EvictionPolicy(ABC):
    """Decides which chunks a tier gives up. No I/O, no clock; used on one thread.

    A chunk is of use only while all chunks before it in its prompt are there, so a policy gives up
    a suffix before its prefix. It is told no prompt, only keys; what it knows of their order it
    learns from `touch`.
    """

    @abstractmethod
    def add(self, key: ChunkKey, size: int) -> None:
        """`key` is held from now on and weighs `size` (bytes or slabs, the tier's choice).

        Raises:
            ValueError: It is held already.
        """

    @abstractmethod
    def touch(self, keys: Sequence[ChunkKey], *, gapless: bool = True) -> None:
        """One prompt's consecutive chunks, in prefix order, were used or asked for together.

        Keys that are not held count too: their place in the prompt is remembered, within a bound.

        Args:
            gapless: False where chunks may have been left out between two of `keys`: they are
                neighbours then only as far as nothing nearer is known.
        """

    @abstractmethod
    def before(self, key: ChunkKey) -> ChunkKey | None:
        """The chunk that the held `key` is known to continue."""

    @abstractmethod
    def discard(self, key: ChunkKey) -> bool:
        """`key` is held no more; whether it was."""

    @abstractmethod
    def evict(
        self, wanted: int, evictable: Callable[[ChunkKey], bool], *, last_resort: bool = False
    ) -> list[ChunkKey]:
        """Chunks to give up, together `wanted` or more; none when they cannot make that up.

        They are not held any more when this returns, in the order in which they should go.

        Args:
            evictable: False for a chunk that somebody uses now; it counts as touched.
            last_resort: When nothing else is left, also chunks before one that is used now.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[ChunkKey]:
        """The keys held, in no order."""
