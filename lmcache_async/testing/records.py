"""Small sealed test records, identified by number, and buffers that hold them."""

from __future__ import annotations

import numpy as np

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.record import RecordFormat, seal, verify
from lmcache_async.tiers.base import Allocate
from lmcache_async.types import Chunk, ChunkKey

FORMAT = RecordFormat(namespace='{"model":"m"}', layout="test", dtype="uint8", chunk_size=16)
"""Format of all test records."""

MAX_PAYLOAD_BYTES = 64 * 1024
SLAB_BYTES = FORMAT.record_bytes(MAX_PAYLOAD_BYTES)
"""Bytes of the longest test record, in whole pages: slab size of an arena for test records."""

ODD_KEYS = (bytes(16), b"\xff" * 16, b"../../etc/passwd", b"a/b\n\r\t \"'*?;&|\x00%", b"con.aux.nul..  .")
"""Keys that need escaping in paths or commands."""


def small_arena(slabs: int) -> Arena:
    """Return an arena of `slabs` slabs of SLAB_BYTES."""
    return Arena(slabs * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)


def allocator(arena: Arena, *, timeout_s: float = 5.0) -> Allocate:
    """Return an `allocate` that leases buffers of `arena`."""

    async def allocate(nbytes: int) -> Buffer:
        return await arena.lease(nbytes, timeout_s=timeout_s)

    return allocate


def chunk_of(number: int) -> Chunk:
    """Return chunk `number`. Chunk 3 has the key 3 and 16 tokens of id 3."""
    tokens = np.full(16, number % (1 << 31), dtype=np.int32)
    return Chunk(key=ChunkKey(number.to_bytes(16, "big")), start=0, tokens=tokens)


def key_of(number: int) -> ChunkKey:
    """Return the key of chunk `number`: the number itself, big-endian in 16 bytes."""
    return chunk_of(number).key


def payload_of(number: int, nbytes: int) -> bytes:
    """Return the payload of chunk `number`: reproducible random bytes that differ between chunks."""
    return np.random.default_rng(number).bytes(nbytes)


def record(arena: Arena, number: int, payload_bytes: int = 5000) -> Buffer:
    """Return a leased buffer with the sealed record of chunk `number`. The caller releases it."""
    buffer = arena.lease_nowait(FORMAT.record_bytes(payload_bytes))
    assert buffer is not None, "the test's arena is too small"
    _write_record(buffer.view, number, payload_bytes)
    return buffer


def record_bytes_of(number: int, payload_bytes: int = 5000) -> bytes:
    """Return the sealed record of chunk `number`."""
    content = bytearray(FORMAT.record_bytes(payload_bytes))
    _write_record(memoryview(content), number, payload_bytes)
    return bytes(content)


def _write_record(view: memoryview, number: int, payload_bytes: int) -> None:
    view[FORMAT.header_bytes :] = payload_of(number, payload_bytes)
    seal(
        view,
        format=FORMAT,
        chunk=chunk_of(number),
        request_namespace="",
        shape=(payload_bytes,),
        payload_bytes=payload_bytes,
    )


def check_record(buffer: Buffer, number: int, payload_bytes: int = 5000) -> None:
    """Assert that `buffer` holds the record of chunk `number`, byte for byte."""
    verify(buffer.view, format=FORMAT, chunk=chunk_of(number), request_namespace="")
    assert bytes(buffer.view[FORMAT.header_bytes :]) == payload_of(number, payload_bytes)


def is_proven(buffer: Buffer, number: int) -> bool:
    """Return whether the record is valid for chunk `number`. Any other record counts as a miss."""
    try:
        verify(buffer.view, format=FORMAT, chunk=chunk_of(number), request_namespace="")
    except ChunkCorruptError:
        return False
    return True
