"""How the store chain ends for one batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from lmcache_async.errors import TierError
from lmcache_async.types import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStored:
    """What became of a batch of chunks: complete when the slowest tier has answered.

    Attributes:
        chunks: Chunks that were given to the tiers.
        outcomes: For each, "" once at least one tier keeps it, or why none does.
        shared: For each, the answers of the tiers that other processes read; None is one that keeps it.
        present: Chunks of the request that were there already.
        dropped: Chunks that never came as far as a tier, by cause.
        bytes: Bytes of the records.
    """

    chunks: tuple[Chunk, ...] = ()
    outcomes: tuple[asyncio.Future[str], ...] = ()
    shared: tuple[tuple[asyncio.Future[TierError | None], ...], ...] = ()
    present: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
