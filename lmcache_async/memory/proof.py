"""What a record proves by itself, read in pieces: for a scrub, which asks for no chunk. No state, any thread."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.record import MAX_HEADER_BYTES, RecordHeader, read_header
from lmcache_async.types import ChunkKey

PIECE_BYTES = MAX_HEADER_BYTES
"""Of the pieces that `prove` takes: the first holds any header."""


def prove(pieces: Iterable[memoryview], *, key: ChunkKey) -> RecordHeader:
    """The header of a record that is whole, unchanged and of that key.

    Whose tokens and namespace it holds is for `verify` to say, when somebody asks for them.

    Args:
        pieces: The record, in pieces of `PIECE_BYTES` or all at once; bytes behind its end mean nothing.
            A piece may be overwritten once the next is asked for.
        key: What it is kept under.

    Raises:
        ChunkCorruptError: It is not.
    """
    header: RecordHeader | None = None
    digest = xxhash.xxh3_128()
    left = 0
    for piece in pieces:
        if header is None:
            header = read_header(piece)
            left = header.payload_bytes
            piece = piece[header.header_bytes :]
        digest.update(piece[:left])
        left -= min(left, len(piece))
    if header is None or left:
        raise ChunkCorruptError(f"record {key.hex()} ends {left} bytes early", cause="length")
    if header.key != key:
        raise ChunkCorruptError(f"record {key.hex()} says it is of key {header.key.hex()}", cause="key")
    if digest.digest() != header.checksum:
        raise ChunkCorruptError(f"record {key.hex()}: its payload is not what was sealed", cause="checksum")
    return header
