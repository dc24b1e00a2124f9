"""Keys of a request's chunks: hashes chained from the namespace's root, one step per chunk.

The message that is hashed for a chunk, P its parent's key (the root for the first), T its token ids
as little-endian int32:

    full, nothing extra     P T
    any other               P T extra(UTF-8) u32 len(extra) u32 (number of tokens | 1 << 31)

A token's sign bit is never set, so the last bit says which form it is, and the second form says where
its parts end: two different chunks never give the same message.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from lmcache_async.errors import ConfigError
from lmcache_async.hashing.digest import Digest, digest_function
from lmcache_async.hashing.namespace import canonical_text
from lmcache_async.hashing.tokens import TokenIds, as_tokens
from lmcache_async.types import KEY_BYTES, MAX_CHUNK_SIZE, Chunk, ChunkKey, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """What the KV of the tokens start..stop of a request depends on besides their ids, such as an image.

    Attributes:
        text: Identity of the content, such as the hash of the image.
    """

    start: int
    stop: int
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"extra {self.text!r} spans the tokens {self.start}..{self.stop}, which is none")


class ChunkHasher:
    """Hashes one request's tokens as they come; what was hashed is never hashed again.

    However the same tokens are split over the calls, the keys are the same. With a `hash_key` nobody can
    compute keys, not even those that follow a key he knows, who does not have it.

    Attributes:
        num_tokens: Tokens given so far.
        parent: Key of the last full chunk, or the root.
    """

    def __init__(
        self,
        root: bytes,
        *,
        chunk_size: int,
        algorithm: str = "xxh3_128",
        hash_key: bytes = b"",
        extras: Iterable[Extra] = (),
    ) -> None:
        _check(root, chunk_size)
        self.parent = root
        self._digest = digest_function(algorithm, hash_key)
        self._chunk_size = chunk_size
        self._start = 0  # of the unfinished chunk
        self._tail = b""  # its tokens
        self._extras = deque(sorted(extras))  # without those that ended before it

    @property
    def num_tokens(self) -> int:
        return self._start + len(self._tail) // _TOKEN_BYTES

    def extend(self, tokens: TokenIds) -> list[Chunk]:
        """The chunks that these tokens complete. Their ids are a read-only copy of the tokens."""
        size, start = self._chunk_size, self._start
        data, keys, texts = self._advance(tokens)
        rows = _ids(data)[: len(keys) * size].reshape(-1, size)
        return [
            Chunk(key, start + at, row, texts.get(at, ""))
            for at, key, row in zip(range(0, rows.size, size), keys, rows, strict=True)
        ]

    def extend_keys(self, tokens: TokenIds) -> list[ChunkKey]:
        """`extend` for who needs no more than the keys: several times faster for a long prompt."""
        return self._advance(tokens)[1]

    def tail(self) -> Chunk | None:
        """The unfinished chunk as a partial one; None right after a full one."""
        ids = _ids(self._tail)
        return self._partial(ids, len(ids)) if len(ids) else None

    def partials(self, unit: int) -> list[Chunk]:
        """The partial chunks that a store could have left here, longest first.

        They are the leading multiples of `unit` tokens of the unfinished chunk.
        """
        ids = _ids(self._tail)
        return [self._partial(ids, length) for length in _lengths(len(ids), unit)]

    def _partial(self, ids: Tokens, length: int) -> Chunk:
        return _partial_chunk(self.parent, ids[:length], self._start, self._digest, self._extras)

    def _advance(self, tokens: TokenIds) -> tuple[bytes, list[ChunkKey], dict[int, str]]:
        """Hash; the unfinished chunk's tokens with the new ones, new keys, extra texts by their offset."""
        digest, extras, parent = self._digest, self._extras, self.parent
        start = self._start
        data = self._tail + _little_endian(as_tokens(tokens))
        chunk_bytes = self._chunk_size * _TOKEN_BYTES
        full_bytes = len(data) - len(data) % chunk_bytes
        keys: list[bytes] = []
        texts: dict[int, str] = {}
        # A concatenation and one call per chunk: on 1 KiB it is as fast as any preallocated buffer.
        for at in range(0, full_bytes, chunk_bytes):
            message = parent + data[at : at + chunk_bytes]
            if extras and (text := _take_text(extras, start + at // _TOKEN_BYTES, self._chunk_size)):
                texts[at // _TOKEN_BYTES] = text
                message += _trailer(text, self._chunk_size)
            parent = digest(message)
            keys.append(parent)
        self.parent = parent
        self._start = start + full_bytes // _TOKEN_BYTES
        self._tail = data[full_bytes:]
        return data, cast("list[ChunkKey]", keys), texts


def partial_candidates(
    parent: bytes,
    tokens: TokenIds,
    *,
    start: int,
    unit: int,
    chunk_size: int,
    algorithm: str = "xxh3_128",
    hash_key: bytes = b"",
    extras: Iterable[Extra] = (),
) -> list[Chunk]:
    """The partial chunks that a store could have left after the chunk `parent`, longest first.

    Args:
        parent: Key of the chunk that ends at `start`, or the root.
        tokens: What follows it; at most the first chunk_size - 1 of them matter.
        start: Position of the first of these tokens in the request.
        unit: Partial chunks are a multiple of so many tokens long.
        extras: All of the request's, by positions in the request.
    """
    _check(parent, chunk_size)
    ids = _ids(_little_endian(as_tokens(tokens)[: chunk_size - 1]))
    digest, ordered = digest_function(algorithm, hash_key), sorted(extras)
    return [
        _partial_chunk(parent, ids[:length], start, digest, ordered) for length in _lengths(len(ids), unit)
    ]


def message_end(tokens: Tokens, extra: str, chunk_size: int) -> bytes:
    """What follows the parent's key in a chunk's message: for who looks for a record's parent.

    Args:
        extra: The chunk's canonical text.
    """
    data = _little_endian(tokens)
    return data if len(tokens) == chunk_size and not extra else data + _trailer(extra, len(tokens))


def _check(parent: bytes, chunk_size: int) -> None:
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a root or key has {KEY_BYTES} bytes, this one {len(parent)}")
    if not 1 <= chunk_size <= MAX_CHUNK_SIZE:
        raise ConfigError(f"chunk_size is {chunk_size}; it is 1 to {MAX_CHUNK_SIZE} tokens")


def _lengths(num_tokens: int, unit: int) -> range:
    if unit < 1:
        raise ValueError(f"unit is {unit}; it is at least 1 token")
    return range(num_tokens - num_tokens % unit, 0, -unit)


def _partial_chunk(parent: bytes, ids: Tokens, start: int, digest: Digest, extras: Iterable[Extra]) -> Chunk:
    text = _overlap_text(extras, start, start + len(ids))
    key = digest(parent + _little_endian(ids) + _trailer(text, len(ids)))
    return Chunk(ChunkKey(key), start, ids, text)


def _trailer(text: str, num_tokens: int) -> bytes:
    body = text.encode("utf-8")
    return body + struct.pack("<II", len(body), num_tokens | 1 << 31)


def _take_text(extras: deque[Extra], start: int, size: int) -> str:
    """The extra text of the chunk at `start`; drops leading extras that ended before it."""
    while extras and extras[0].stop <= start:
        extras.popleft()
    return _overlap_text(extras, start, start + size)


def _overlap_text(extras: Iterable[Extra], start: int, stop: int) -> str:
    """Canonical text of the extras (in order) that reach into start..stop, relative to start."""
    found: list[Sequence[int | str]] = []
    for extra in extras:
        if extra.start >= stop:
            break
        if extra.stop > start:
            found.append((extra.start - start, extra.stop - start, extra.text))
    return canonical_text(found) if found else ""


def _little_endian(tokens: Tokens) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


def _ids(data: bytes) -> Tokens:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False) if data else np.empty(0, np.int32)
