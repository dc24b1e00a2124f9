"""A request's tokens and keys, written by the lookup client's thread and read by the scheduler's.

What the other thread reads are immutable bytes, replaced by longer ones, and `num_hashed` is written
after what it counts. So the scheduler's thread reads up to it without a lock, and a slice is one copy.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lmcache_async.hashing import ChunkHasher, Extra, partial_candidates
from lmcache_async.types import KEY_BYTES, Chunk, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_async.integration.vllm.wire import Identity

PIECE_TOKENS = 4096
"""Tokens hashed at one go, some 100 µs; then other threads may have the GIL."""

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as vLLM names it.

    Attributes:
        load_id: vLLM's number of it, another one when it was unloaded and loaded again.
    """

    name: str
    path: str
    reloaded_in_place: bool = False
    load_id: int = 0


@dataclass(frozen=True, slots=True)
class Tail:
    """The whole blocks after a prompt's last full chunk, as one partial chunk; keys by rank."""

    start: int
    num_tokens: int
    keys: tuple[bytes, ...]
    text: str


@dataclass(slots=True, eq=False)
class RequestChain:
    """One request's chain of keys, for each rank.

    Attributes:
        source: The request's token ids; vLLM appends to it.
        requested: Tokens that the scheduler's thread asked to be hashed.
        num_hashed: Tokens whose full chunks have their keys.
        keys: For each rank the full chunks' keys, 16 bytes each.
        tokens: The hashed tokens, int32.
        texts: Extra text of those full chunks that have one, by the chunk's index.
        tail: The prompt's partial end, once the prompt is hashed; None if it has no whole block.
        failed: The tokens cannot be hashed; the request has no keys.
    """

    request_id: str
    source: Sequence[int]
    num_prompt_tokens: int
    adapter: Adapter | None = None
    cache_salt: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    extras: tuple[Extra, ...] = ()
    requested: int = 0
    num_hashed: int = 0
    keys: tuple[bytes, ...] = ()
    tokens: bytes = b""
    texts: dict[int, str] = field(default_factory=dict)
    tail: Tail | None = None
    request_namespace: str = ""
    failed: bool = False
    _identity: Identity | None = None
    _hash_key: bytes = field(default=b"", repr=False)
    _roots: tuple[bytes, ...] = ()
    _hashers: dict[bytes, ChunkHasher] = field(default_factory=dict)

    def key(self, rank: int, chunk: int) -> bytes:
        return self.keys[rank][chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]

    def packed_keys(self, first: int, stop: int) -> tuple[bytes, ...]:
        """Keys of the full chunks first..stop, for each rank."""
        return tuple(keys[first * KEY_BYTES : stop * KEY_BYTES] for keys in self.keys)

    def texts_of(self, first: int, stop: int) -> dict[int, str]:
        """Extra texts of the full chunks first..stop, by index from `first`."""
        if not self.texts:
            return {}
        texts = dict(self.texts)  # a copy: the client's thread may be adding
        return {chunk - first: text for chunk, text in texts.items() if first <= chunk < stop}

    @property
    def told_as(self) -> str | None:
        """What KV events call the adapter; None where its tokens alone do not say what a chunk is."""
        if self.cache_salt or self.tags or self.extras:
            return None
        return self.adapter.name if self.adapter is not None else ""

    def packed_tokens(self, start: int, stop: int) -> bytes:
        return self.tokens[start * _TOKEN_BYTES : stop * _TOKEN_BYTES]

    def keys_at(self, num_tokens: int, chunk_size: int) -> tuple[bytes, ...]:
        """For each rank the key of the chunk that ends behind so many tokens; empty if there is none yet."""
        full, rest = divmod(num_tokens, chunk_size)
        if not 0 < num_tokens <= self.num_hashed:
            return ()
        if not rest:
            return tuple(self.key(rank, full - 1) for rank in range(len(self.keys)))
        ends = self.tail is not None and self.tail.start + self.tail.num_tokens == num_tokens
        return self.tail.keys if self.tail is not None and ends else ()

    def marks(self, num_tokens: int, chunk_size: int) -> tuple[str, str] | None:
        """What tells another process which namespace this is, and which `num_tokens` tokens: two digests.

        None where no chunk ends there, or as long as it is not hashed.
        """
        keys = self.keys_at(num_tokens, chunk_size)
        return (_digest(self._roots), _digest(keys)) if keys else None

    # From here on: the lookup client's thread only.

    @property
    def identity(self) -> Identity:
        """Of the first rank. The ranks agree on all but the root."""
        if self._identity is None:
            raise RuntimeError(f"the chain of {self.request_id} is not open")
        return self._identity

    @property
    def opened(self) -> bool:
        return self._identity is not None

    def open(
        self, roots: Sequence[bytes], identity: Identity, request_namespace: str, hash_key: bytes = b""
    ) -> None:
        """Begin. `roots` are the ranks' roots for this request; ranks of one root share the work."""
        self._identity = identity
        self._hash_key = hash_key
        self._roots = tuple(roots)
        self._hashers = {
            root: ChunkHasher(
                root,
                chunk_size=identity.chunk_size,
                algorithm=identity.algorithm,
                hash_key=hash_key,
                extras=self.extras,
            )
            for root in roots
        }
        self.request_namespace = request_namespace
        self.keys = (b"",) * len(roots)

    def extend(self, num_tokens: int, pause: Callable[[], None]) -> None:
        """Hash up to `num_tokens`; `pause` is called between pieces.

        Raises:
            ValueError: An id is no token id.
        """
        while self.num_hashed < num_tokens:
            start = self.num_hashed
            stop = min(num_tokens, start + PIECE_TOKENS)
            if start < self.num_prompt_tokens:
                stop = min(stop, self.num_prompt_tokens)
            piece = np.frombuffer(array("i", self.source[start:stop]), np.int32)
            self.tokens += piece.tobytes()
            new = {root: self._new_keys(hasher, piece) for root, hasher in self._hashers.items()}
            if any(new.values()):
                self.keys = tuple(keys + new[root] for keys, root in zip(self.keys, self._roots, strict=True))
            if stop == self.num_prompt_tokens:
                self.tail = self._prompt_tail()
            self.num_hashed = stop
            pause()

    def end_candidates(self) -> list[list[Chunk]]:
        """For each rank the partial chunks that may follow the last full one, longest first."""
        unit = self.identity.block_size
        made = {root: hasher.partials(unit) for root, hasher in self._hashers.items()}
        return [made[root] for root in self._roots]

    def hole_candidates(self, chunk: int) -> list[list[Chunk]]:
        """For each rank the partial chunks that may be there in place of the full chunk `chunk`."""
        identity = self.identity
        start = chunk * identity.chunk_size
        tokens: Tokens = np.frombuffer(self.packed_tokens(start, start + identity.chunk_size), np.int32)
        made = {
            root: partial_candidates(
                self.key(self._roots.index(root), chunk - 1) if chunk else root,
                tokens,
                start=start,
                unit=identity.block_size,
                chunk_size=identity.chunk_size,
                algorithm=identity.algorithm,
                hash_key=self._hash_key,
                extras=self.extras,
            )
            for root in self._hashers
        }
        return [made[root] for root in self._roots]

    def _new_keys(self, hasher: ChunkHasher, piece: Tokens) -> bytes:
        if not self.extras:
            return b"".join(hasher.extend_keys(piece))
        size, chunks = self.identity.chunk_size, hasher.extend(piece)
        self.texts.update({chunk.start // size: chunk.extra for chunk in chunks if chunk.extra})
        return b"".join(chunk.key for chunk in chunks)

    def _prompt_tail(self) -> Tail | None:
        candidates = self.end_candidates()
        if not candidates[0]:
            return None
        longest = candidates[0][0]
        return Tail(longest.start, len(longest.tokens), tuple(c[0].key for c in candidates), longest.extra)


def _digest(keys: Sequence[bytes]) -> str:
    """Tells nothing of the keys to who does not have them."""
    return hashlib.sha256(b"lmcache-async/handover/1:" + b"".join(keys)).hexdigest()[:32]
