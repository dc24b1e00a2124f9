"""The cpu tier: chunks stay in the arena. A put keeps a lease of the slab, a get returns another one."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import takewhile
from typing import Self

from lmcache_async.errors import ConfigError, TierError, TierFullError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.cpu.config import CPUConfig
from lmcache_async.tiers.base import Allocate, Capabilities, Medium, TierStatistics
from lmcache_async.tiers.bundled import BundledTier
from lmcache_async.tiers.eviction import LRUPolicy
from lmcache_async.types import ChunkKey

_CAPABILITIES = Capabilities(in_arena=True, removes=True, lists=True, local_index=True, medium=Medium.MEMORY)

MAX_COUNTED = 1024
"""Maximum number of lookups by other threads that are queued for the eviction policy. Beyond it, the oldest are dropped."""


class CPUTier(BundledTier[CPUConfig, Arena]):
    """Keeps leases of slabs of the arena. No call waits. A record is only copied if it is not in the arena.

    When the arena has no free slab, it calls this tier, which evicts the least recently used chunks whose
    slabs have no other lease.
    """

    config_type = CPUConfig

    def __init__(self, config: CPUConfig) -> None:
        super().__init__(config, "cpu tier")
        self._max_slabs = 0
        self._chunks: dict[ChunkKey, Buffer] = {}
        self._policy = LRUPolicy()
        self._counted: deque[Sequence[ChunkKey]] = deque(maxlen=MAX_COUNTED)
        self._evictions = 0

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def bind(self, arena: Arena) -> None:
        """Use the slabs of the arena and register as its reclaimer.

        Raises:
            ConfigError: `max_bytes` is less than one slab.
        """
        max_bytes = self.config.max_bytes
        self._max_slabs = arena.num_slabs
        if max_bytes is not None:
            self._max_slabs = min(max_bytes // arena.slab_bytes, arena.num_slabs)
        if self._max_slabs < 1:
            raise ConfigError(
                f"the cpu tier's max_bytes is {max_bytes}, but one chunk needs {arena.slab_bytes}"
                " bytes: raise max_bytes or lower chunk_size"
            )
        super().bind(arena)
        arena.add_reclaimer(self._reclaim)

    async def contains(self, key: ChunkKey) -> bool:
        self._usable()
        return key in self._chunks

    def count_in_memory(self, keys: Sequence[ChunkKey]) -> int:
        if keys:
            self._counted.append(keys)
        return sum(1 for _ in takewhile(self._chunks.__contains__, keys))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._usable()
        self._policy.touch(keys, gapless=False)
        return [key in self._chunks for key in keys]

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        """Return further leases of the chunks. `allocate` is not called."""
        del allocate
        self._usable()
        self._policy.touch(keys)
        found = map(self._chunks.get, keys)
        return [None if buffer is None else buffer.retain() for buffer in found]

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        self._usable()
        self._touch_counted()
        results: list[TierError | None] = []
        for key, buffer in items:
            try:
                self._keep(key, buffer)
            except TierError as error:
                results.append(error)
            else:
                results.append(None)
        self._policy.touch_each([key for key, _ in items])
        return results

    async def remove(self, key: ChunkKey) -> bool:
        self._usable()
        if key not in self._chunks:
            return False
        self._policy.discard(key)
        self._chunks.pop(key).release()
        return True

    async def keys(self) -> AsyncIterator[ChunkKey]:
        self._usable()
        for key in tuple(self._chunks):
            yield key

    async def clear(self) -> int:
        self._usable()
        return self._drop_all()

    def statistics(self) -> TierStatistics:
        slab_bytes = self._arena.slab_bytes if self._arena else 0
        return TierStatistics(
            chunks=len(self._chunks),
            bytes=len(self._chunks) * slab_bytes,
            max_bytes=self._max_slabs * slab_bytes if self._arena else self.config.max_bytes,
            evictions=self._evictions,
        )

    async def __aenter__(self) -> Self:
        self._open(self._bound())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close. All leases are released and the chunks are dropped."""
        self._opened = None
        self._drop_all()

    def _keep(self, key: ChunkKey, buffer: Buffer) -> None:
        if key in self._chunks:
            return  # the same content
        # Added to the policy first, so that the preceding chunks of its prompt are not evicted for it.
        self._policy.add(key, 1)
        try:
            if len(self._chunks) >= self._max_slabs:
                self._make_room()
            self._chunks[key] = buffer.retain() if buffer.is_of(self._arena) else self._copy(buffer)
        except BaseException:
            self._policy.discard(key)
            raise

    def _make_room(self) -> None:
        if not self._evict(1):
            raise TierFullError(f"all {self._max_slabs} slabs of the cpu tier are in use")

    def _copy(self, buffer: Buffer) -> Buffer:
        """Return a lease of a copy in the arena."""
        lease = self._bound().lease_nowait(buffer.nbytes)
        if lease is None:
            raise TierFullError(f"the arena has no slab free for a chunk of {buffer.nbytes} bytes")
        lease.view[:] = buffer.view
        return lease

    def _reclaim(self, slabs: int) -> int:
        """Evict chunks for the arena, if necessary all whose slabs have no other lease. Return their number.

        If the requested number cannot be freed, as many as possible are freed. Otherwise one call of `lease` could wait
        forever for the slab of a chunk on which another call has a lease.
        """
        if freed := self._evict(slabs, last_resort=True):
            return freed
        free = sum(map(self._is_evictable, self._chunks))
        return self._evict(min(slabs, free), last_resort=True)

    def _touch_counted(self) -> None:
        """Touch the chunks that other threads have looked up. The policy is only used on the thread of the loop."""
        while self._counted:
            self._policy.touch(self._counted.popleft(), gapless=False)

    def _evict(self, slabs: int, *, last_resort: bool = False) -> int:
        self._touch_counted()
        victims = self._policy.evict(slabs, self._is_evictable, last_resort=last_resort)
        for key in victims:
            self._chunks.pop(key).release()
        self._evictions += len(victims)
        if victims and self.on_evicted is not None:
            self.on_evicted(victims)
        return len(victims)

    def _is_evictable(self, key: ChunkKey) -> bool:
        buffer = self._chunks.get(key)  # None: being put at this moment
        return buffer is not None and not buffer.shared

    def _drop_all(self) -> int:
        chunks, self._chunks = self._chunks, {}
        self._policy = LRUPolicy()
        for buffer in chunks.values():
            buffer.release()
        return len(chunks)
