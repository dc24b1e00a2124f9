"""LRU eviction, suffixes before their prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from lmcache_async.types import ChunkKey

# Number of remembered predecessors of chunks that are not stored yet (looked up, to be stored later): the number
# of stored chunks, within these bounds. Most chunks looked up in a full tier are never stored, so their entries
# are useless. The lower bound covers a prompt of a million tokens in chunks of 256. An entry takes about 230 bytes.
MIN_HINTS = 1 << 12
MAX_HINTS = 1 << 16

MAX_STEPS = 64
"""A chunk is linked to its nearest stored predecessor if at most this many unstored chunks are between them. Each `add` takes up
to this many steps, also if nothing is stored, as in a full tier that refuses a long prompt."""


class LRUPolicy:
    """Selects the chunks that a full tier deletes: the least recently used ones without a stored continuation.

    The policy orders keys; the tier that owns it moves the bytes. It has no I/O and no clock and is used on one
    thread. A chunk is usable only while all chunks before it in its prompt are stored, so a suffix is evicted
    before its prefix. The policy receives keys only, no prompts; `touch` is its only source for their order.

    Two rules keep prefixes longer than suffixes:

    - A batch is touched from its end, so its earlier chunks are more recent.
    - The predecessor of each chunk in its prompt is remembered as a link. Keys are chained, so a link holds
      in every request. A chunk with a stored continuation is *parked*: it is taken from the queue when it
      reaches the old end, and returns there when its last continuation is removed. This covers prompts that
      arrive in several batches or chunk by chunk, and interleaved batches, if one lookup contained the chunks
      together.

    Each operation takes amortised O(1) time per key: a key is parked at most once each time it enters the queue.

    Args:
        max_hints: Maximum number of remembered predecessors of chunks that are not stored.
    """

    def __init__(self, *, max_hints: int = MAX_HINTS) -> None:
        self._max_hints = max_hints
        self._sizes: dict[ChunkKey, int] = {}
        self._total = 0
        # Oldest first. Stored keys that are not in the queue are parked.
        self._queue: OrderedDict[ChunkKey, None] = OrderedDict()
        # Stored key -> its predecessor, stored or not; and the number of stored keys with a key as predecessor.
        self._parents: dict[ChunkKey, ChunkKey] = {}
        self._continuations: dict[ChunkKey, int] = {}
        # Predecessors of keys that are not stored yet.
        self._hints: OrderedDict[ChunkKey, ChunkKey] = OrderedDict()

    def add(self, key: ChunkKey, size: int) -> None:
        """Record a chunk that is now stored.

        Args:
            key: The chunk.
            size: Its size, in the unit of the tier (bytes or slabs).

        Raises:
            ValueError: The key is stored already.
        """
        if key in self._sizes:
            raise ValueError(f"chunk {key.hex()} is stored already")
        self._sizes[key] = size
        self._total += size
        self._queue[key] = None
        parent = self._hints.pop(key, None)
        if parent is not None:
            self._link(key, parent if parent in self._sizes else self._nearest(parent))

    def touch(self, keys: Sequence[ChunkKey], *, gapless: bool = True) -> None:
        """Record the use or lookup of consecutive chunks of one prompt.

        The predecessors of keys that are not stored are remembered too, up to a maximum number.

        Args:
            keys: Keys in prefix order.
            gapless: False if chunks between two of `keys` may have been left out. The pair is then treated as
                neighbours only if no nearer neighbour is known.
        """
        self.touch_each(keys)
        if len(keys) < 2:
            return
        sizes, parents, hints = self._sizes, self._parents, self._hints
        seen: set[ChunkKey] | None = None
        for parent, child in pairwise(keys):
            held = child in sizes
            known = parents.get(child) if held else hints.get(child)
            if held and known != parent and parent not in sizes:
                parent = self._nearest(parent)
            if known == parent:
                continue
            if known is not None and not gapless:
                # Keep the nearer one. A known predecessor that is in this batch is farther from `child` than `parent` is.
                seen = seen or set(keys)
                if known not in seen:
                    continue
            if held:
                self._unlink(child)
                self._link(child, parent)
            else:
                hints[child] = parent
                if known is not None:
                    hints.move_to_end(child)
        self._trim_hints()

    def touch_each(self, keys: Sequence[ChunkKey]) -> None:
        """Record the use of chunks of one or several prompts, each prompt's in prefix order."""
        queue, sizes = self._queue, self._sizes
        for key in reversed(keys):
            if key in queue:
                queue.move_to_end(key)
            elif key in sizes:
                queue[key] = None

    def before(self, key: ChunkKey) -> ChunkKey | None:
        """Return the known predecessor of a stored chunk in its prompt; None if it is not known."""
        return self._parents.get(key)

    def discard(self, key: ChunkKey) -> bool:
        """Remove a key whose chunk was deleted, or was not stored after all. Return whether it was recorded.

        Its predecessor is remembered, so that adding the key again does not evict the predecessor.
        """
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self._total -= size
        self._queue.pop(key, None)
        parent = self._parents.get(key)
        self._unlink(key)
        if parent is not None:
            self._hints[key] = parent
            self._trim_hints()
        return True

    def restore(self, key: ChunkKey, size: int, parent: ChunkKey | None) -> None:
        """Add a chunk that was selected by `evict` but not deleted. It becomes the first chunk to evict.

        Args:
            key: The chunk.
            size: Its size.
            parent: Its predecessor, from the links of `evict`.
        """
        self.add(key, size)
        if parent is not None and key not in self._parents:
            self._link(key, parent)
        self._queue.move_to_end(key, last=False)

    def evict(
        self,
        wanted: int,
        evictable: Callable[[ChunkKey], bool],
        *,
        last_resort: bool = False,
        links: dict[ChunkKey, ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """Select chunks to delete and remove them from the policy.

        Args:
            wanted: Total size to free, in the unit of `add`.
            evictable: Returns False for a chunk that is in use; such a chunk counts as touched.
            last_resort: If nothing else is left, also select predecessors of chunks that are in use.
            links: Receives the predecessor of each selected chunk, for `restore`.

        Returns:
            Chunks with a total size of at least `wanted`, in the order of deletion; an empty list if that is
            not possible.
        """
        if wanted > self._total:
            return []
        freed = 0
        victims: list[ChunkKey] = []
        in_use: list[ChunkKey] = []
        of_victims: list[tuple[ChunkKey, ChunkKey]] = []  # links
        cut: list[tuple[ChunkKey, ChunkKey]] = []  # links of chunks in use
        checked = 0  # chunks in use that were cut from their predecessors
        while freed < wanted:
            if not self._queue:
                if not last_resort or checked == len(in_use):
                    break
                cut += self._cut(in_use[checked:])
                checked = len(in_use)
                continue
            key, _ = self._queue.popitem(last=False)
            if key in self._continuations:
                continue  # parked
            if not evictable(key):
                in_use.append(key)
                continue
            victims.append(key)
            freed += self._sizes[key]
            if (parent := self._parents.get(key)) is not None:
                of_victims.append((key, parent))
                self._unlink(key)
        for key in in_use:
            self._queue[key] = None
        if freed < wanted:
            for key in reversed(victims):
                self._queue[key] = None
                self._queue.move_to_end(key, last=False)
            cut += of_victims
            victims = []
        for key, parent in cut:
            self._link(key, parent)
        for key in victims:
            self._total -= self._sizes.pop(key)
        if links is not None and victims:
            links.update(of_victims)
        return victims

    def oldest(self, evictable: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """Return the evictable chunk to evict first, without removing it; None if there is none.

        Chunks that are not evictable keep their age, so each call passes over them again.
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

    def _trim_hints(self) -> None:
        bound = min(max(MIN_HINTS, len(self._sizes)), self._max_hints)
        while len(self._hints) > bound:
            self._hints.popitem(last=False)

    def _nearest(self, key: ChunkKey) -> ChunkKey:
        """Return `key` if it is stored, else its nearest stored ancestor within `MAX_STEPS`, else `key`."""
        ancestor: ChunkKey | None = key
        for _ in range(MAX_STEPS):
            if ancestor is None:
                break
            if ancestor in self._sizes:
                return ancestor
            ancestor = self._hints.get(ancestor)
        return key

    def _link(self, child: ChunkKey, parent: ChunkKey) -> None:
        # Chains have no cycles, but a caller that passes keys in a wrong order could create one, which would
        # never be evicted. Only a chunk with continuations can close a cycle.
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
            # It was parked, so it is older than every key in the queue.
            self._queue[parent] = None
            self._queue.move_to_end(parent, last=False)

    def _cut(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, ChunkKey]]:
        """Unlink chunks from their predecessors. Return the removed links."""
        links = [(key, self._parents[key]) for key in keys if key in self._parents]
        for key, _ in links:
            self._unlink(key)
        return links


EvictionPolicy: TypeAlias = LRUPolicy
"""Name of the interface of policies in version 0.1. There is one policy."""
