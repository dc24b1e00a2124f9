"""Small sealed records, and buffers that hold them."""

from __future__ import annotations

import numpy as np

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal, verify
from lmcache_async.types import Chunk, ChunkKey

FORMAT = RecordFormat(namespace='{"model":"m"}', layout="test", dtype="uint8", chunk_size=16)
SLAB_BYTES = FORMAT.record_bytes(64 * 1024)


def chunk_of(number: int) -> Chunk:
    """The chunk of that number; chunk 3 has key 3 and tokens 3."""
    tokens = np.full(16, number, dtype=np.int32)
    return Chunk(key=ChunkKey(number.to_bytes(16, "big")), start=0, tokens=tokens)


def key_of(number: int) -> ChunkKey:
    return chunk_of(number).key


def payload_of(number: int, nbytes: int) -> bytes:
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
