"""Keys of the chunks of a request: hashes chained from the root of the namespace, one step per chunk.

The hashed message of a chunk, where P is the key of its parent (the root for the first chunk) and T are its
token ids as little-endian int32:

    full chunk, no extra    P T
    any other               P T extra(UTF-8) u32 len(extra) u32 (number of tokens | 1 << 31)

The sign bit of a token is never set, so the last bit identifies the form. The second form contains the
lengths of its parts. Therefore two different chunks never have the same message.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lmcache_async.errors import ConfigError
from lmcache_async.hashing.digest import digest_function
from lmcache_async.hashing.namespace import canonical_text
from lmcache_async.hashing.tokens import TokenIds, as_tokens
from lmcache_async.types import KEY_BYTES, MAX_CHUNK_SIZE, Chunk, ChunkKey, Tokens

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """Further dependency of the KV of the tokens start..stop of a request, such as an image.

    Attributes:
        start: Position of the first token in the request.
        stop: Position of the last token, exclusive.
        text: Identity of the content, such as the hash of the image.

    Raises:
        ValueError: The span is empty or negative.
    """

    start: int
    stop: int
    text: str

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"extra {self.text!r} has the empty token range {self.start}..{self.stop}")


class ChunkHasher:
    """Incremental hasher of the tokens of one request. Each token is hashed once.

    The keys do not depend on how the tokens are split over the calls.

    Args:
        root: Root of the keys, 16 bytes; see `RequestNamespace.root`.
        chunk_size: Tokens of a full chunk.
        algorithm: One of `ALGORITHMS`.
        hash_key: Secret of 32 bytes, or b"" for none. Without it keys cannot be computed, not even those that
            follow a known key.
        extras: Extras of the request, by positions in the request.
        start: Position of the first token in the request. The root is then the key of the chunk before it.

    Attributes:
        num_tokens: Position after the last token so far.
        parent: Key of the last full chunk, or the root.

    Raises:
        ConfigError: `chunk_size` is out of range, or the algorithm is unknown or takes no key.
        MissingDependencyError: The algorithm needs a package that is not installed.
        ValueError: `root` has the wrong length.
    """

    def __init__(
        self,
        root: bytes,
        *,
        chunk_size: int,
        algorithm: str = "xxh3_128",
        hash_key: bytes = b"",
        extras: Iterable[Extra] = (),
        start: int = 0,
    ) -> None:
        if len(root) != KEY_BYTES:
            raise ValueError(f"a root or key has {len(root)} bytes; expected {KEY_BYTES}")
        if not 1 <= chunk_size <= MAX_CHUNK_SIZE:
            raise ConfigError(f"chunk_size is {chunk_size}; expected 1 to {MAX_CHUNK_SIZE} tokens")
        self.parent = root
        self._digest = digest_function(algorithm, hash_key)
        self._chunk_size = chunk_size
        self._start = start  # first token of the unfinished chunk
        self._tail = b""  # tokens of the unfinished chunk
        self._extras = deque(sorted(extras))  # extras that end before the unfinished chunk are removed

    @property
    def num_tokens(self) -> int:
        return self._start + len(self._tail) // _TOKEN_BYTES

    def extend(self, tokens: TokenIds) -> list[Chunk]:
        """Append tokens and return the chunks that they complete. Their ids are a read-only copy."""
        size, start = self._chunk_size, self._start
        data, keys, texts = self._advance(tokens)
        rows = _ids(data)[: len(keys) * size].reshape(-1, size)
        return [
            Chunk(key, start + at, row, texts.get(at, ""))
            for at, key, row in zip(range(0, rows.size, size), keys, rows, strict=True)
        ]

    def extend_keys(self, tokens: TokenIds) -> list[ChunkKey]:
        """Append tokens and return only the keys. Several times faster than `extend` for a long prompt."""
        return self._advance(tokens)[1]

    def tail(self) -> Chunk | None:
        """Return the unfinished chunk as a partial chunk; None if it has no tokens."""
        ids = _ids(self._tail)
        return self._partial(ids, len(ids)) if len(ids) else None

    def partials(self, unit: int) -> list[Chunk]:
        """Return the partial chunks that may be stored for the unfinished chunk, longest first.

        They are its leading multiples of `unit` tokens.
        """
        if unit < 1:
            raise ValueError(f"unit is {unit}; expected at least 1 token")
        ids = _ids(self._tail)
        return [self._partial(ids, length) for length in range(len(ids) - len(ids) % unit, 0, -unit)]

    def _partial(self, ids: Tokens, length: int) -> Chunk:
        text = _overlap_text(self._extras, self._start, self._start + length)
        message = self.parent + self._tail[: length * _TOKEN_BYTES] + _trailer(text, length)
        return Chunk(ChunkKey(self._digest(message)), self._start, ids[:length], text)

    def _advance(self, tokens: TokenIds) -> tuple[bytes, list[ChunkKey], dict[int, str]]:
        """Hash the completed chunks.

        Returns:
            The tokens from the start of the previously unfinished chunk on as bytes, the new keys, and the
            extra texts by token offset in these tokens.
        """
        digest, extras, parent = self._digest, self._extras, self.parent
        start = self._start
        data = self._tail + as_tokens(tokens).astype("<i4", copy=False).tobytes()
        chunk_bytes = self._chunk_size * _TOKEN_BYTES
        full_bytes = len(data) - len(data) % chunk_bytes
        keys: list[bytes] = []
        texts: dict[int, str] = {}
        # One concatenation and one call per chunk: for 1 KiB this is as fast as a preallocated buffer.
        for at in range(0, full_bytes, chunk_bytes):
            message = parent + data[at : at + chunk_bytes]
            if extras:
                first = start + at // _TOKEN_BYTES
                while extras and extras[0].stop <= first:
                    extras.popleft()
                if text := _overlap_text(extras, first, first + self._chunk_size):
                    texts[at // _TOKEN_BYTES] = text
                    message += _trailer(text, self._chunk_size)
            parent = digest(message)
            keys.append(parent)
        self.parent = parent
        self._start = start + full_bytes // _TOKEN_BYTES
        self._tail = data[full_bytes:]
        return data, cast("list[ChunkKey]", keys), texts


def packed_keys(
    root: bytes, tokens: bytes, *, chunk_size: int, algorithm: str = "xxh3_128", hash_key: bytes = b""
) -> bytes:
    """Return the keys of the chunks of `tokens`, 16 bytes each, of which the last chunk may be partial.

    Equal to those of a `ChunkHasher` without extras, several times faster for few tokens.

    Args:
        root: Root of the keys, 16 bytes.
        tokens: Token ids as little-endian int32, which `as_tokens` has checked.
        chunk_size: Tokens of a full chunk.
        algorithm: As for `ChunkHasher`.
        hash_key: As for `ChunkHasher`.
    """
    digest, chunk_bytes = digest_function(algorithm, hash_key), chunk_size * _TOKEN_BYTES
    keys = [root]
    for at in range(0, len(tokens), chunk_bytes):
        chunk = tokens[at : at + chunk_bytes]
        end = b"" if len(chunk) == chunk_bytes else _trailer("", len(chunk) // _TOKEN_BYTES)
        keys.append(digest(keys[-1] + chunk + end))
    return b"".join(keys[1:])


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
    """Return the partial chunks that may be stored after the chunk `parent`, longest first.

    Args:
        parent: Key of the chunk that ends at `start`, or the root.
        tokens: Tokens after it; at most the first chunk_size - 1 are used.
        start: Position of the first of these tokens in the request.
        unit: The length of a partial chunk is a multiple of this number of tokens.
        chunk_size: Tokens of a full chunk.
        algorithm: As for `ChunkHasher`.
        hash_key: As for `ChunkHasher`.
        extras: All extras of the request, by positions in the request.

    Raises:
        ConfigError: As for `ChunkHasher`.
        ValueError: `parent` has the wrong length, or `unit` is less than 1.
    """
    hasher = ChunkHasher(
        parent, chunk_size=chunk_size, algorithm=algorithm, hash_key=hash_key, extras=extras, start=start
    )
    hasher.extend_keys(as_tokens(tokens)[: chunk_size - 1])
    return hasher.partials(unit)


def _trailer(text: str, num_tokens: int) -> bytes:
    body = text.encode("utf-8")
    return body + struct.pack("<II", len(body), num_tokens | 1 << 31)


def _overlap_text(extras: Iterable[Extra], start: int, stop: int) -> str:
    """Return the canonical text of the sorted extras that overlap start..stop, relative to start."""
    found: list[Sequence[int | str]] = []
    for extra in extras:
        if extra.start >= stop:
            break
        if extra.stop > start:
            found.append((extra.start - start, extra.stop - start, extra.text))
    return canonical_text(found) if found else ""


def _ids(data: bytes) -> Tokens:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False) if data else np.empty(0, np.int32)
