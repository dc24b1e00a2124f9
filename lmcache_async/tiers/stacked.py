"""A tier in its place in the stack, and what a fetch from the stack comes to."""

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
    """A tier in its place.

    Attributes:
        id: Its name in config, log lines and counters; unique in the stack.
        tier: The tier with its layers.
        writer: The queue before it; None for a tier in the arena, which takes a chunk at once, and for one
            that takes none.
    """

    id: str
    tier: Tier
    writer: TierWriter | None = None

    @property
    def leaves_memory(self) -> bool:
        """Whether its records are outside of the process's memory."""
        return not self.tier.capabilities.in_arena

    @property
    def takes(self) -> bool:
        """Whether it is given records; others are only read from."""
        return self.tier.capabilities.writes

    async def holds(self, keys: Sequence[ChunkKey], positions: list[int]) -> list[int]:
        """Which of these positions of `keys` it has, as far as it is cheap to know.

        Raises:
            TierError: The tier failed.
        """
        wanted = [keys[position] for position in positions]
        if self.tier.capabilities.local_index:
            there = await self.tier.contains_many(wanted)
            return [position for position, present in zip(positions, there, strict=True) if present]
        return positions[: await self.tier.count_prefix(wanted)]

    async def put_now(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> Sequence[TierError | None]:
        """Give it records past the queue; for each None, or why not."""
        try:
            return await self.tier.put_many(items)
        except TierError as error:
            return [error] * len(items)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch came to: the leading chunks' buffers, leased to the caller.

    Attributes:
        buffers: One for each chunk up to the first hole.
        tiers: Which tier gave each.
        cause: Why there is a hole; "" when all chunks were there.
    """

    buffers: tuple[Buffer, ...]
    tiers: tuple[int, ...]
    cause: str
