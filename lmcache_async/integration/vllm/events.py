"""Chunk events: which tier has which chunk, from the workers to the scheduler, vLLM's KV events and hit statistics."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent

from lmcache_async.engine.lookup import MemoryLookups
from lmcache_async.integration.vllm.lookup_server import unpack_keys
from lmcache_async.integration.vllm.versions import CacheHitSource
from lmcache_async.logging import LimitedLogger
from lmcache_async.tiers.base import Medium
from lmcache_async.types import Chunk, ChunkKey, Tokens

logger = LimitedLogger(logging.getLogger(__name__))

MAX_ANNOUNCED = 8192
"""Maximum number of chunks whose tokens are kept, because a tier may write them later."""
MAX_EVENTS = 65536
"""Maximum number of events that wait for vLLM's next step. If there are more, the oldest are dropped."""
MAX_CHANGES = 65536
"""Maximum number of chunks in host memory whose changes wait for vLLM's next step. If there are more, all are dropped, and
the scheduler's view of the rank is emptied."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tier has stored a full chunk."""

    tier: str
    key: bytes
    parent: bytes  # key of the chunk before it; empty for the first one of a prompt
    tokens: bytes  # int32 in native byte order
    lora_name: str  # empty without an adapter


@dataclass(frozen=True, slots=True)
class Removed:
    """A tier no longer has these chunks. It may never have had some of them."""

    tier: str
    keys: tuple[bytes, ...]


ChunkEvent: TypeAlias = Stored | Removed


class ChunkEvents:
    """Collects the chunk events of one rank's tiers. Runs on the engine's loop, except `take`.

    A key does not reveal its tokens, so chunks are passed to `announce` before they reach a tier. Chunks
    that token ids alone do not identify (with a salt, tags or images) are not reported as stored.
    """

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._known: dict[ChunkKey, tuple[bytes, Tokens, str]] = {}
        self._new: deque[ChunkEvent] = deque(maxlen=MAX_EVENTS)

    def announce(self, chunks: Sequence[Chunk], parent: bytes, lora_name: str | None) -> None:
        """Announce consecutive chunks that will be stored, or loaded and perhaps promoted to faster tiers.

        Args:
            parent: Key of the chunk before the first one; empty for the first one of a prompt.
            lora_name: Name of the adapter, "" without one; None if no event is published.
        """
        if lora_name is None:
            return
        for chunk in chunks:
            if len(chunk.tokens) == self._chunk_size:
                self._known.pop(chunk.key, None)  # the chunks announced last are kept
                self._known[chunk.key] = parent, chunk.tokens, lora_name
            parent = chunk.key
        while len(self._known) > MAX_ANNOUNCED:
            del self._known[next(iter(self._known))]

    def stored(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            if (known := self._known.get(key)) is not None:
                parent, tokens, lora_name = known
                self._add(Stored(tier, key, parent, tokens.tobytes(), lora_name))

    def removed(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        self._add(Removed(tier, tuple(keys)))

    def take(self) -> tuple[ChunkEvent, ...]:
        """Events since the last call. Called by the model's thread."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return tuple(taken)

    def _add(self, event: ChunkEvent) -> None:
        if len(self._new) == self._new.maxlen:
            logger.report(
                "full", "vLLM does not collect KV events; the oldest of %d events are dropped", MAX_EVENTS
            )
        self._new.append(event)


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Chunks that a rank has stored in host memory, or evicted from it, since its last change.

    Attributes:
        tier: Id of the tier in host memory.
        stored: Keys of stored chunks, 16 bytes each.
        removed: Keys of removed chunks. The tier may never have had some of them.
        restart: Whether earlier changes were lost.
    """

    tier: str
    stored: bytes
    removed: bytes
    restart: bool = False


class MemoryChanges:
    """Collects the changes of the tier in host memory, for the scheduler's `MemoryView` of this rank.

    Runs on the engine's loop, except `take`.

    Attributes:
        tier: Id of the tier; None if no tier is in host memory or not all of its changes are reported.
    """

    def __init__(self) -> None:
        self.tier: str | None = None
        self._lock = threading.Lock()
        self._changed: dict[ChunkKey, bool] = {}  # whether the last change stored the chunk
        self._restart = False

    def stored(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        self._add(tier, keys, stored=True)

    def removed(self, tier: str, keys: Sequence[ChunkKey]) -> None:
        self._add(tier, keys, stored=False)

    def take(self) -> MemoryChange | None:
        """Return the changes since the last call; None if there are none. Called by the model's thread."""
        if self.tier is None or not (self._changed or self._restart):
            return None
        with self._lock:
            changed, self._changed = self._changed, {}
            restart, self._restart = self._restart, False
        stored = b"".join([key for key, is_stored in changed.items() if is_stored])
        removed = b"".join([key for key, is_stored in changed.items() if not is_stored])
        return MemoryChange(self.tier, stored, removed, restart)

    def _add(self, tier: str, keys: Sequence[ChunkKey], *, stored: bool) -> None:
        if tier != self.tier:
            return
        with self._lock:
            self._changed.update(dict.fromkeys(keys, stored))
            if len(self._changed) > MAX_CHANGES:
                self._changed.clear()
                self._restart = True


class MemoryView:
    """The chunks that one rank has in host memory, as of its last report. Runs on the scheduler's thread.

    It may lack chunks of the rank, and have some that were evicted since the report. A load of these fails.
    """

    def __init__(self) -> None:
        self._tier = ""
        self._keys: set[ChunkKey] = set()

    def apply(self, change: MemoryChange) -> None:
        if change.restart:
            self._keys.clear()
        self._tier = change.tier
        self._keys.update(unpack_keys(change.stored))
        self._keys.difference_update(unpack_keys(change.removed))

    def clear(self) -> None:
        self._keys.clear()

    def lookups(self) -> MemoryLookups | None:
        """Return a lookup in this view, whose misses are never certain; None if no chunk is known."""
        return MemoryLookups(self._tier, self._count) if self._keys else None

    def _count(self, keys: Sequence[ChunkKey]) -> int:
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))


_SOURCES = {Medium.MEMORY: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
"""vLLM has no kind for remote stores other than `EXTERNAL_UNSPECIFIED`."""


def kv_events(events: Iterable[ChunkEvent], media: Mapping[str, Medium]) -> list[KVCacheEvent]:
    """Return events as vLLM's KV events, by which routers send a prompt to an engine that has its prefix.

    There is one event for each stored chunk, and one for each group of removed chunks. A block of an event is a chunk,
    its hash is the chunk key, and its parent is the chunk before it. Consumers identify blocks by their token ids, as
    they do with blocks of the device.

    Args:
        media: Where each tier stores records, by its id.
    """
    return [_event(event, media.get(event.tier, Medium.REMOTE)) for event in events]


def _event(event: ChunkEvent, stored_in: Medium) -> KVCacheEvent:
    medium = MEDIUM_CPU if stored_in is Medium.MEMORY else MEDIUM_STORAGE
    locality = "REMOTE" if stored_in is Medium.REMOTE else "LOCAL"
    if isinstance(event, Stored):
        tokens = np.frombuffer(event.tokens, np.int32).tolist()
        return BlockStored(
            block_hashes=[event.key],
            parent_block_hash=event.parent or None,
            token_ids=tokens,
            block_size=len(tokens),
            lora_id=None,
            medium=medium,
            lora_name=event.lora_name or None,
            locality=locality,
            ownership=event.tier,
        )
    return BlockRemoved(block_hashes=list(event.keys), medium=medium, locality=locality, ownership=event.tier)


def hit_sources(
    tokens_by_tier: Mapping[str, int], num_tokens: int, media: Mapping[str, Medium]
) -> dict[CacheHitSource, int]:
    """Loaded tokens by vLLM's kind of store; they add up to `num_tokens`.

    Args:
        tokens_by_tier: Loaded tokens by the id of the tier.
        media: Where each tier stores records, by its id.
    """
    found: dict[CacheHitSource, int] = {}
    for tier, tokens in tokens_by_tier.items():
        source = _SOURCES.get(media.get(tier, Medium.REMOTE), CacheHitSource.EXTERNAL_UNSPECIFIED)
        found[source] = found.get(source, 0) + tokens
    if rest := num_tokens - sum(tokens_by_tier.values()):
        found[CacheHitSource.EXTERNAL_UNSPECIFIED] = found.get(CacheHitSource.EXTERNAL_UNSPECIFIED, 0) + rest
    return found
