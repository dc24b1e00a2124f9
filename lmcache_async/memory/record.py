"""The sealed record: header pages and payload in one piece, which prove themselves right or are corrupt.

A record starts with a fixed little-endian prefix (magic, version, sizes, the header's checksum), then a
msgpack map, then zeros up to a page's end, then the payload. The header's checksum covers all of the
header pages; the payload's checksum is in the header. Functions here keep no state and may run in
worker threads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgpack  # type: ignore[import-untyped]
import numpy as np
import xxhash

from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.header import (
    CHECKSUM,
    MAGIC,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    VERSION,
    RecordHeader,
    corrupt,
    header_checksum,
    read_header,
)
from lmcache_async.types import KEY_BYTES, Chunk, Tokens

_MAX_TEXT_BYTES = 512  # of a request's own texts; longer ones are stored as their digest
_CHECKSUM_BYTES = 16
_TOKEN_TYPE = np.dtype("<i4")
_MAP_BYTES = 256  # field names, key, checksum, shape and msgpack's own marks; 214 at most


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What all records of an engine have in common.

    Attributes:
        namespace: The engine's namespace text.
        layout: Text of the KV layout of the payload.
        dtype: Of the KV cache.
        chunk_size: Tokens of a full chunk.
        reserved_bytes: Zeros that every header ends in, for who encrypts records.
        header_bytes: Bytes before the payload: a multiple of 4096 with room for any chunk's header.
    """

    namespace: str
    layout: str
    dtype: str
    chunk_size: int
    reserved_bytes: int = 0
    header_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        texts = sum(len(_utf8(text)) for text in (self.namespace, self.layout, self.dtype))
        nbytes = PREFIX.size + _MAP_BYTES + texts + 2 * _MAX_TEXT_BYTES + 4 * self.chunk_size
        nbytes += self.reserved_bytes
        header_bytes = -(-nbytes // PAGE) * PAGE
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"a record's header would have {header_bytes} bytes, more than {MAX_HEADER_BYTES}:"
                f" chunk_size is {self.chunk_size}, the texts have {texts} bytes"
            )
        object.__setattr__(self, "header_bytes", header_bytes)

    def record_bytes(self, payload_bytes: int) -> int:
        return self.header_bytes + payload_bytes


def seal(
    view: memoryview,
    *,
    format: RecordFormat,
    chunk: Chunk,
    request_namespace: str,
    shape: tuple[int, ...],
    payload_bytes: int,
    checksum: bytes | None = None,
) -> None:
    """Write the header in front of the payload that is in `view[header_bytes:]` already.

    `checksum` is the payload's xxh3_128 where it is known; else the payload is read for it.

    Raises:
        ValueError: The chunk or the payload does not fit the format or the view.
    """
    header_bytes = format.header_bytes
    stop = header_bytes + payload_bytes
    if not 0 <= payload_bytes <= MAX_PAYLOAD_BYTES or stop > len(view):
        raise ValueError(f"a record of {stop} bytes does not fit {len(view)}")
    if len(chunk.tokens) > format.chunk_size or len(shape) > MAX_DIMENSIONS or len(chunk.key) != KEY_BYTES:
        raise ValueError(f"a chunk of {len(chunk.tokens)} tokens, shape {shape}, key {chunk.key.hex()}")
    checksum = checksum or xxhash.xxh3_128_digest(view[header_bytes:stop])
    packed = _pack_fields(format, chunk, request_namespace, shape, checksum)
    start = PREFIX.size + len(packed)
    header = view[:header_bytes]
    PREFIX.pack_into(header, 0, MAGIC, VERSION, header_bytes, len(packed), payload_bytes, bytes(8))
    header[PREFIX.size : start] = packed
    header[start:] = bytes(header_bytes - start)
    header[CHECKSUM] = header_checksum(header)


def is_sealed(
    view: memoryview,
    *,
    format: RecordFormat,
    chunk: Chunk,
    request_namespace: str,
    shape: tuple[int, ...],
    payload: bool = True,
) -> bool:
    """Whether the record is, byte for byte, what `seal` makes of this chunk; a third of what `verify` takes.

    False says nothing of the cause: `verify` does. Arguments are those of `verify`, and the shape.
    """
    header_bytes = format.header_bytes
    if len(view) < header_bytes:
        return False
    header = view[:header_bytes]
    packed = _pack_fields(format, chunk, request_namespace, shape, bytes(_CHECKSUM_BYTES))
    stop = PREFIX.size + len(packed)
    own = bytes(header[CHECKSUM])
    start = PREFIX.pack(MAGIC, VERSION, header_bytes, len(packed), len(view) - header_bytes, own)
    # The payload's checksum is the last of the fields, and the one thing that is not known before.
    if bytes(header[: stop - _CHECKSUM_BYTES]) != start + packed[:-_CHECKSUM_BYTES]:
        return False
    if header_checksum(header) != own:
        return False
    checksum = bytes(header[stop - _CHECKSUM_BYTES : stop])
    return not payload or xxhash.xxh3_128_digest(view[header_bytes:]) == checksum


def verify(
    view: memoryview, *, format: RecordFormat, chunk: Chunk, request_namespace: str, payload: bool = True
) -> RecordHeader:
    """The header of a record that is proven to be this chunk's, whole and unchanged.

    Args:
        view: All of the record and nothing else.
        format: Of the engine that wants to use it.
        chunk: What was asked for; its key alone proves nothing.
        request_namespace: Of the request that asks.
        payload: Whether to read the payload for its checksum; else the header alone is proven.

    Raises:
        ChunkCorruptError: Something disagrees.
    """
    header = read_header(view)
    record_bytes = header.header_bytes + header.payload_bytes
    if len(view) != record_bytes or header.header_bytes != format.header_bytes:
        raise corrupt("length", f"the record has {len(view)} bytes, its header says {record_bytes}")
    if header.key != chunk.key:
        raise corrupt("key", f"the record is of key {header.key.hex()}, not {chunk.key.hex()}")
    if header.namespace != format.namespace or header.request_namespace != _bounded(request_namespace):
        raise corrupt("namespace", f"the record of key {chunk.key.hex()} is of another namespace")
    # Equal keys and other tokens: a hash collision. Bytes are compared, so nothing is left to chance.
    if _token_bytes(header.tokens) != _token_bytes(chunk.tokens) or header.extra != _bounded(chunk.extra):
        raise corrupt("tokens", f"the record of key {chunk.key.hex()} is of other tokens")
    if header.layout != format.layout or header.dtype != format.dtype:
        raise corrupt("layout", f"the record is {header.dtype} {header.layout}, not {format.layout}")
    if payload and xxhash.xxh3_128_digest(view[header.header_bytes :]) != header.checksum:
        raise corrupt("checksum", f"the payload of key {chunk.key.hex()} is not what was sealed")
    return header


def _pack_fields(
    format: RecordFormat, chunk: Chunk, request_namespace: str, shape: tuple[int, ...], checksum: bytes
) -> bytes:
    fields = {
        "key": chunk.key,
        "namespace": format.namespace,
        "request_namespace": _bounded(request_namespace),
        "tokens": _token_bytes(chunk.tokens),
        "extra": _bounded(chunk.extra),
        "layout": format.layout,
        "dtype": format.dtype,
        "shape": shape,
        "checksum": checksum,
    }
    packed: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    return packed


def _token_bytes(tokens: Tokens) -> bytes:
    return (tokens if tokens.dtype is _TOKEN_TYPE else tokens.astype(_TOKEN_TYPE)).tobytes()


def _bounded(text: str) -> str:
    """The text, or its digest where it is long; never the same for two texts."""
    data = _utf8(text)
    if len(data) <= _MAX_TEXT_BYTES and not text.startswith("sha256:"):
        return text
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a salt may be any str
