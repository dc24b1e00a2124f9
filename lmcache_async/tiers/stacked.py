"""An entry of the tier stack, and the result of a fetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.writer import TierWriter
from lmcache_async.types import ChunkKey


@dataclass(frozen=True, slots=True)
class StackedTier:
    """A tier in the stack.

    Attributes:
        id: Name in the configuration, log lines and counters; unique in the stack.
        tier: The tier with its layers.
        writer: Write queue of the tier; None for a tier in the arena, which stores a chunk at once, and for a
            read-only tier.
    """

    id: str
    tier: Tier
    writer: TierWriter | None = None

    @property
    def leaves_memory(self) -> bool:
        """Whether its records are stored outside the memory of the process."""
        return not self.tier.capabilities.in_arena

    @property
    def takes(self) -> bool:
        """Whether the tier accepts writes; otherwise it is only read."""
        return self.tier.capabilities.writes

    async def holds(self, keys: Sequence[ChunkKey], positions: list[int]) -> list[int]:
        """Return the positions of stored chunks.

        A tier without a local index is only queried for a prefix, so stored chunks after the first miss are
        left out.

        Args:
            keys: Keys of all chunks.
            positions: Positions in `keys` to look up, ascending.

        Returns:
            The subset of `positions` whose chunks are stored.

        Raises:
            TierError: The tier failed.
        """
        wanted = [keys[position] for position in positions]
        if self.tier.capabilities.local_index:
            there = await self.tier.contains_many(wanted)
            return [position for position, present in zip(positions, there, strict=True) if present]
        return positions[: await self.tier.count_prefix(wanted)]

    async def put_now(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> Sequence[TierError | None]:
        """Store records without the queue. For each, return None or the error."""
        try:
            return await self.tier.put_many(items)
        except TierError as error:
            return [error] * len(items)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch: buffers of the leading chunks, leased to the caller.

    Attributes:
        buffers: One for each chunk up to the first missing one.
        tiers: For each buffer the index of the tier that it was read from.
        cause: Why the prefix ends early; "" if all chunks were read.
    """

    buffers: tuple[Buffer, ...]
    tiers: tuple[int, ...]
    cause: str
