"""Which peer has which key, as far as it is known. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from lmcache_async.types import ChunkKey

MAX_REJECTED = 10_000


class Places:
    """Remembers who has a key for a while, and records that nobody is to be asked for again.

    Args:
        max_keys: More are forgotten, the oldest first.
        keep_s: Seconds after which a key is asked for again.
    """

    def __init__(self, max_keys: int, keep_s: float) -> None:
        self._max_keys = max_keys
        self._keep_s = keep_s
        self._known: OrderedDict[ChunkKey, tuple[float, frozenset[int]]] = OrderedDict()
        self._rejected: OrderedDict[ChunkKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, key: ChunkKey, peers: Iterable[int], now: float) -> None:
        """These peers have it, and no others that were asked."""
        self._known.pop(key, None)
        if having := frozenset(peers):
            self._known[key] = (now + self._keep_s, having)
        while len(self._known) > self._max_keys:
            self._known.popitem(last=False)

    def of(self, key: ChunkKey, now: float) -> frozenset[int]:
        """The peers that had it a while ago; none where that is not known."""
        until, having = self._known.get(key, (0.0, frozenset()))
        return having if now < until else frozenset()

    def forget(self, key: ChunkKey, peer: int) -> None:
        """The peer has it no more."""
        if key in self._known:
            until, having = self._known[key]
            if having - {peer}:
                self._known[key] = (until, having - {peer})
            else:
                del self._known[key]

    def reject(self, key: ChunkKey) -> None:
        """What the peers have under the key is wrong, and may stay there: never ask for it again."""
        self._known.pop(key, None)
        self._rejected[key] = None
        while len(self._rejected) > MAX_REJECTED:
            self._rejected.popitem(last=False)

    def rejected(self, key: ChunkKey) -> bool:
        return key in self._rejected

    def accept(self, key: ChunkKey) -> None:
        """A new record was put under the key."""
        self._rejected.pop(key, None)


def rank(names: Iterable[str], key: ChunkKey) -> list[int]:
    """Positions of the names in the order in which they are to have the key.

    Each key has an order of its own, the same in every process; where a name goes or comes only the keys
    that it is the first for go elsewhere.
    """
    weights = [blake2b(name.encode() + b"\0" + key, digest_size=8).digest() for name in names]
    return sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
