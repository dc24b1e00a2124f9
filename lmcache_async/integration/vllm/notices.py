"""Which tier has which chunk, from the worker to the scheduler, for vLLM's KV events."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.integration.vllm.metadata import Job
    from lmcache_async.types import Chunk, ChunkKey, Tokens

logger = LimitedLogger(logging.getLogger(__name__))

MAX_KNOWN = 8192
"""Chunks whose tokens are remembered for tiers that write them later."""
MAX_NOTICES = 65536
"""That wait for a step of vLLM's; the oldest go first, and then consumers know a little less."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A tier has a full chunk.

    Attributes:
        parent: The key of the chunk before it; empty for a prompt's first one.
        tokens: Its token ids, int32 in the machine's order.
        lora_name: The adapter's; empty without.
    """

    tier: str
    key: bytes
    parent: bytes
    tokens: bytes
    lora_name: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A tier does not have these chunks any more, if it ever had them."""

    tier: str
    keys: tuple[bytes, ...]


Notice: TypeAlias = Kept | Gone


class Notices:
    """Watches the tiers of one rank on the engine's loop; only `take` is called off it.

    Keys say nothing of their tokens, so jobs are made known before their chunks come to a tier. What no
    consumer could tell from its tokens alone (a salt, tags, images) is not told of.
    """

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._known: dict[ChunkKey, tuple[bytes, Tokens, str]] = {}
        self._new: deque[Notice] = deque()

    def know(self, job: Job, chunks: Sequence[Chunk], rank: int) -> None:
        """These chunks are about to be stored, or loaded and so perhaps copied into faster tiers."""
        if job.told_as is None:
            return
        parent = job.parents[rank] if job.parents else b""
        for chunk in chunks:
            if len(chunk.tokens) == self._chunk_size:
                self._known[chunk.key] = parent, chunk.tokens, job.told_as
            parent = chunk.key
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def kept(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            if (known := self._known.get(key)) is not None:
                parent, tokens, lora_name = known
                self._add(Kept(tier, key, parent, tokens.tobytes(), lora_name))

    def gone(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        self._add(Gone(tier, tuple(keys)))

    def take(self) -> tuple[Notice, ...]:
        """Those since the last call. For the model's thread."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return tuple(taken)

    def _add(self, notice: Notice) -> None:
        if len(self._new) >= MAX_NOTICES:
            logger.report("full", "vLLM took no KV events for long; the oldest of %d are lost", MAX_NOTICES)
            self._new.popleft()
        self._new.append(notice)
