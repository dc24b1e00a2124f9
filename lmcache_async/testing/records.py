"""Small sealed records by number, and buffers that hold them: what tests put into a tier."""

from __future__ import annotations

import numpy as np

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal, verify
from lmcache_async.types import Chunk, ChunkKey

FORMAT = RecordFormat(namespace='{"model":"m"}', layout="test", dtype="uint8", chunk_size=16)
"""What all records made here have in common."""

MAX_PAYLOAD_BYTES = 64 * 1024
SLAB_BYTES = FORMAT.record_bytes(MAX_PAYLOAD_BYTES)
"""Bytes of the longest record made here, in whole pages: the slab of an arena for them."""


def small_arena(slabs: int) -> Arena:
    """An arena with room for so many records."""
    return Arena(slabs * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)


def chunk_of(number: int) -> Chunk:
    """The chunk of that number; chunk 3 has key 3 and tokens 3."""
    tokens = np.full(16, number % (1 << 31), dtype=np.int32)
    return Chunk(key=ChunkKey(number.to_bytes(16, "big")), start=0, tokens=tokens)


def key_of(number: int) -> ChunkKey:
    """The key of chunk `number`: the number itself, 16 bytes, so that any key has a number."""
    return chunk_of(number).key


def payload_of(number: int, nbytes: int) -> bytes:
    """Bytes that are that chunk's and no other's."""
    return np.random.default_rng(number).bytes(nbytes)


def write_record(buffer: Buffer, number: int, payload_bytes: int) -> None:
    """Seal chunk `number` in `buffer`, which has the record's length."""
    buffer.view[FORMAT.header_bytes :] = payload_of(number, payload_bytes)
    seal(
        buffer.view,
        format=FORMAT,
        chunk=chunk_of(number),
        request_namespace="",
        shape=(payload_bytes,),
        payload_bytes=payload_bytes,
    )


def record(arena: Arena, number: int, payload_bytes: int = 5000) -> Buffer:
    """A leased buffer with the sealed record of chunk `number`."""
    buffer = arena.lease_nowait(FORMAT.record_bytes(payload_bytes))
    assert buffer is not None, "the test's arena is too small"
    write_record(buffer, number, payload_bytes)
    return buffer


def check_record(buffer: Buffer, number: int, payload_bytes: int = 5000) -> None:
    """It is that chunk's record, to the byte."""
    verify(buffer.view, format=FORMAT, chunk=chunk_of(number), request_namespace="")
    assert bytes(buffer.view[FORMAT.header_bytes :]) == payload_of(number, payload_bytes)


def is_proven(buffer: Buffer, number: int) -> bool:
    """Whether the framework would take it for chunk `number`: everything else it counts as a miss."""
    try:
        verify(buffer.view, format=FORMAT, chunk=chunk_of(number), request_namespace="")
    except ChunkCorruptError:
        return False
    return True
