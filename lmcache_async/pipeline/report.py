"""Result of the store chain for one batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from lmcache_async.errors import TierError
from lmcache_async.types import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStored:
    """Result of storing a batch of chunks. Complete when the slowest tier has finished.

    Attributes:
        chunks: Chunks that were written to the tiers.
        outcomes: For each chunk, "" if at least one tier stored it, else the cause.
        shared: For each chunk, the results of the tiers that are shared with other processes; None if the
            tier stored it, else the error.
        present: Number of chunks of the request that were stored before.
        dropped: Number of chunks that were dropped before the write, by cause.
        bytes: Total bytes of the records.
    """

    chunks: tuple[Chunk, ...] = ()
    outcomes: tuple[asyncio.Future[str], ...] = ()
    shared: tuple[tuple[asyncio.Future[TierError | None], ...], ...] = ()
    present: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
