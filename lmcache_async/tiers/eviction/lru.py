"""Least recently used, suffixes before their prefixes."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

from lmcache_async.tiers.eviction.base import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_async.types import ChunkKey

# Places in a prompt remembered for chunks not held yet: those of a lookup whose store is still to come. As many
# as chunks are held, within these bounds: what is never stored, as of most lookups of a full tier, is of no use.
# The lower one covers a prompt of a million tokens in chunks of 256. A place takes some 230 bytes.
MIN_HINTS = 1 << 12
MAX_HINTS = 1 << 16


class LRUPolicy(EvictionPolicy):
    """Gives up the least recently used chunk that no held chunk continues.

    Two things keep prefixes longer than suffixes:

    - a batch is touched from its end, so that its earlier chunks are the more recent ones;
    - neighbours in a prompt are remembered as a link from a chunk to the one before it. Keys are
      chained, so such a link is true in every request. While a chunk has a held continuation it is
      *parked*: it leaves the queue when it comes to its old end, and is back there as soon as its
      last continuation has gone. That holds for prompts that arrive in several batches or chunk by
      chunk, and for batches that interleave, as long as some lookup named the chunks together.

    Each operation costs O(1) a key, amortised: every parking pays for one return to the queue.
    """

    def __init__(self, *, max_hints: int = MAX_HINTS) -> None:
        self._max_hints = max_hints
        self._sizes: dict[ChunkKey, int] = {}
        self._total = 0
        # Oldest first. Held keys that are not in here are parked.
        self._queue: OrderedDict[ChunkKey, None] = OrderedDict()
        # Held key -> the key before it, held or not; and how many held keys name a key as that.
        self._parents: dict[ChunkKey, ChunkKey] = {}
        self._continuations: dict[ChunkKey, int] = {}
        # The same link for keys that are not held yet.
        self._hints: OrderedDict[ChunkKey, ChunkKey] = OrderedDict()

    def add(self, key: ChunkKey, size: int) -> None:
        if key in self._sizes:
            raise ValueError(f"chunk {key.hex()} is held already")
        self._sizes[key] = size
        self._total += size
        self._queue[key] = None
        parent = self._nearest(self._hints.pop(key, None))
        if parent is not None:
            self._link(key, parent)

    def touch(self, keys: Sequence[ChunkKey], *, gapless: bool = True) -> None:
        queue, sizes, parents = self._queue, self._sizes, self._parents
        for key in reversed(keys):
            if key in queue:
                queue.move_to_end(key)
            elif key in sizes:
                queue[key] = None
        if len(keys) < 2:
            return
        seen: set[ChunkKey] | None = None
        for parent, child in pairwise(keys):
            held = child in sizes
            known = parents.get(child) if held else self._hints.get(child)
            if known == parent:
                continue
            if known is not None and not gapless:
                # The nearer of the two is right: a known one that is further ahead in this batch is not.
                seen = seen or set(keys)
                if known not in seen:
                    continue
            if held:
                self._unlink(child)
                self._link(child, parent)
            else:
                self._hint(child, parent)

    def before(self, key: ChunkKey) -> ChunkKey | None:
        return self._parents.get(key)

    def discard(self, key: ChunkKey) -> bool:
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self._total -= size
        self._queue.pop(key, None)
        self._unlink(key)
        return True

    def evict(
        self, wanted: int, evictable: Callable[[ChunkKey], bool], *, last_resort: bool = False
    ) -> list[ChunkKey]:
        if wanted > self._total:
            return []
        freed = 0
        victims: list[ChunkKey] = []
        undo: list[tuple[ChunkKey, ChunkKey | None]] = []
        in_use: list[ChunkKey] = []
        cut: list[tuple[ChunkKey, ChunkKey]] = []
        while freed < wanted and (self._queue or (last_resort and self._cut(in_use, cut))):
            key, _ = self._queue.popitem(last=False)
            if key in self._continuations:
                continue  # parked
            if not evictable(key):
                in_use.append(key)
                continue
            victims.append(key)
            undo.append((key, self._parents.get(key)))
            freed += self._sizes[key]
            self._unlink(key)
        for key in in_use:
            self._queue[key] = None
        if freed < wanted:
            self._restore(undo)
        for key, parent in cut:
            self._link(key, parent)
        if freed < wanted:
            return []
        for key in victims:
            self._total -= self._sizes.pop(key)
        return victims

    def oldest(self, evictable: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The chunk to give up first of those that `evictable` allows; it stays held.

        What is not evictable keeps its age, so each call passes over it again.
        """
        parked: list[ChunkKey] = []
        found = None
        for key in self._queue:
            if key in self._continuations:
                parked.append(key)
            elif evictable(key):
                found = key
                break
        for key in parked:
            del self._queue[key]
        return found

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._sizes)

    def _nearest(self, key: ChunkKey | None) -> ChunkKey | None:
        """`key`, or where it is not held the nearest held one known before it, if there is any."""
        ancestor = key
        for _ in range(len(self._hints)):
            if ancestor is None or ancestor in self._sizes:
                break
            ancestor = self._hints.get(ancestor)
        return ancestor or key

    def _hint(self, child: ChunkKey, parent: ChunkKey) -> None:
        self._hints[child] = parent
        self._hints.move_to_end(child)
        bound = min(max(MIN_HINTS, len(self._sizes)), self._max_hints)
        while len(self._hints) > bound:
            self._hints.popitem(last=False)

    def _link(self, child: ChunkKey, parent: ChunkKey) -> None:
        # A chain cannot bite its tail; a caller that mixes orders up could make it seem so, and the
        # ring would never be evicted. Only a chunk that has continuations can close one.
        if child in self._continuations or child == parent:
            ancestor: ChunkKey | None = parent
            while ancestor is not None:
                if ancestor == child:
                    return
                ancestor = self._parents.get(ancestor)
        self._parents[child] = parent
        self._continuations[parent] = self._continuations.get(parent, 0) + 1

    def _unlink(self, child: ChunkKey) -> None:
        parent = self._parents.pop(child, None)
        if parent is None:
            return
        left = self._continuations[parent] - 1
        if left:
            self._continuations[parent] = left
            return
        del self._continuations[parent]
        if parent in self._sizes and parent not in self._queue:
            # It was parked, so it is older than all in the queue.
            self._queue[parent] = None
            self._queue.move_to_end(parent, last=False)

    def _cut(self, in_use: Sequence[ChunkKey], cut: list[tuple[ChunkKey, ChunkKey]]) -> bool:
        """Part chunks in use from what they continue; whether that left anything to give up."""
        for key in in_use:
            parent = self._parents.get(key)
            if parent is not None:
                self._unlink(key)
                cut.append((key, parent))
        return bool(self._queue)

    def _restore(self, undo: Sequence[tuple[ChunkKey, ChunkKey | None]]) -> None:
        for key, parent in reversed(undo):
            self._queue[key] = None
            self._queue.move_to_end(key, last=False)
            if parent is not None:
                self._link(key, parent)
