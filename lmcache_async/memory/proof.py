"""What a record proves by itself, read in pieces: for a scrub, which asks for no chunk. No state, any thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import xxhash

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.encryption import ENVELOPE_BYTES, envelope_checksum, is_encrypted
from lmcache_async.memory.header import MAX_HEADER_BYTES, peek_sizes, read_header
from lmcache_async.types import ChunkKey

PIECE_BYTES = MAX_HEADER_BYTES
"""Of the pieces that `prove` takes: the first holds any header."""


def prove(pieces: Iterable[memoryview], *, key: ChunkKey) -> int:
    """The length of a record that is whole, unchanged and, as far as it is not encrypted, of that key.

    Whose tokens and namespace it holds is for `verify` to say, when somebody asks for them.

    Args:
        pieces: The record, in pieces of `PIECE_BYTES` or all at once; bytes behind its end mean nothing.
            A piece may be overwritten once the next is asked for.
        key: What it is kept under.

    Raises:
        ChunkCorruptError: It is not.
    """
    rest = iter(pieces)
    first = next(rest, memoryview(b""))
    _, record_bytes = peek_sizes(first)
    if is_encrypted(first):
        start, checksum = ENVELOPE_BYTES, envelope_checksum(first)
    else:
        header = read_header(first)
        start, checksum = header.header_bytes, header.checksum
        if header.key != key:
            raise ChunkCorruptError(f"record {key.hex()} says it is of key {header.key.hex()}", cause="key")
    left, digest = _digest(first[start:], rest, record_bytes - start)
    if left:
        raise ChunkCorruptError(f"record {key.hex()} ends {left} bytes early", cause="length")
    if digest != checksum:
        raise ChunkCorruptError(f"record {key.hex()}: it is not what was sealed", cause="checksum")
    return record_bytes


def _digest(piece: memoryview, rest: Iterator[memoryview], nbytes: int) -> tuple[int, bytes]:
    """How many of the bytes are missing, and the checksum of those that are there."""
    digest = xxhash.xxh3_128()
    left = nbytes
    for part in chain((piece,), rest):
        digest.update(part[:left])
        left -= min(left, len(part))
        if not left:
            break
    return left, digest.digest()
