"""Verification of a record without its chunk, in pieces, for a scrub. Stateless; any thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import xxhash

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.encryption import ENVELOPE_BYTES, envelope_checksum, is_encrypted
from lmcache_async.memory.header import MAX_HEADER_BYTES, peek_sizes, read_header
from lmcache_async.types import ChunkKey

PIECE_BYTES = MAX_HEADER_BYTES
"""Size of the pieces for `prove`. The first piece contains any header."""


def prove(pieces: Iterable[memoryview], *, key: ChunkKey) -> int:
    """Verify that a record is complete, unchanged and, unless it is encrypted, of this key.

    The tokens and the namespace are verified by `verify`, on a load.

    Args:
        pieces: The record, in pieces of `PIECE_BYTES` or in one piece. Bytes after its end are ignored. A
            piece may be overwritten when the next one is requested.
        key: Key under which the record is stored.

    Returns:
        Bytes of the record.

    Raises:
        ChunkCorruptError: The verification failed.
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
    """Return the number of missing bytes of `nbytes`, and the checksum of the others."""
    digest = xxhash.xxh3_128()
    left = nbytes
    for part in chain((piece,), rest):
        digest.update(part[:left])
        left -= min(left, len(part))
        if not left:
            break
    return left, digest.digest()
