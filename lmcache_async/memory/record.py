"""The sealed record: header pages and payload in one piece, which prove themselves right or are corrupt.

A record starts with a fixed little-endian prefix (magic, version, sizes, the header's checksum), then a
msgpack map, then zeros up to a page's end, then the payload. The header's checksum covers all of the
header pages; the payload's checksum is in the header. Functions here keep no state and may run in
worker threads.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import xxhash

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey, Tokens

VERSION = 1
MAX_HEADER_BYTES = 1 << 20
"""What a header may be at most; a size from outside is compared with it before it is used."""
MAX_PAYLOAD_BYTES = 1 << 34
MAX_RECORD_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
MAGIC = b"LMCASYNC"
ENCRYPTED = 1 << 15
"""Set in the version of a record that is encrypted; see encryption.py."""

_PREFIX = struct.Struct("<8sHIIQ8s")  # magic, version, header bytes, msgpack bytes, payload bytes, checksum
_CHECKSUM = slice(_PREFIX.size - 8, _PREFIX.size)
_MAX_TEXT_BYTES = 512  # of a request's own texts; longer ones are stored as their digest
_MAX_DIMENSIONS = 8
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
        nbytes = _PREFIX.size + _MAP_BYTES + texts + 2 * _MAX_TEXT_BYTES + 4 * self.chunk_size
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


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself.

    Attributes:
        request_namespace: The text; its SHA-256 (`sha256:...`) if it is longer than 512 bytes.
        tokens: int32 of shape (num_tokens,), read-only.
        extra: As `request_namespace`.
        shape: Of the payload, as given to `seal`.
        checksum: xxh3_128 of the payload, 16 bytes.
    """

    version: int
    key: ChunkKey
    namespace: str
    request_namespace: str
    tokens: Tokens
    extra: str
    layout: str
    dtype: str
    shape: tuple[int, ...]
    header_bytes: int
    payload_bytes: int
    checksum: bytes


def seal(
    view: memoryview,
    *,
    format: RecordFormat,
    chunk: Chunk,
    request_namespace: str,
    shape: tuple[int, ...],
    payload_bytes: int,
) -> None:
    """Write the header in front of the payload that is in `view[header_bytes:]` already.

    Raises:
        ValueError: The chunk or the payload does not fit the format or the view.
    """
    header_bytes = format.header_bytes
    stop = header_bytes + payload_bytes
    if not 0 <= payload_bytes <= MAX_PAYLOAD_BYTES or stop > len(view):
        raise ValueError(f"a record of {stop} bytes does not fit {len(view)}")
    if len(chunk.tokens) > format.chunk_size or len(shape) > _MAX_DIMENSIONS or len(chunk.key) != KEY_BYTES:
        raise ValueError(f"a chunk of {len(chunk.tokens)} tokens, shape {shape}, key {chunk.key.hex()}")
    fields = {
        "key": bytes(chunk.key),
        "namespace": format.namespace,
        "request_namespace": _bounded(request_namespace),
        "tokens": _token_bytes(chunk.tokens),
        "extra": _bounded(chunk.extra),
        "layout": format.layout,
        "dtype": format.dtype,
        "shape": [int(length) for length in shape],
        "checksum": xxhash.xxh3_128_digest(view[header_bytes:stop]),
    }
    packed = msgpack.packb(fields, unicode_errors="surrogatepass")
    start = _PREFIX.size + len(packed)
    header = view[:header_bytes]
    _PREFIX.pack_into(header, 0, MAGIC, VERSION, header_bytes, len(packed), payload_bytes, bytes(8))
    header[_PREFIX.size : start] = packed
    header[start:] = bytes(header_bytes - start)
    header[_CHECKSUM] = _header_checksum(header)


def peek_sizes(first_page: memoryview) -> tuple[int, int]:
    """The header's bytes and the record's, from its first 4096 bytes; within bounds, but not proven yet.

    An encrypted record tells them too.

    Raises:
        ChunkCorruptError: This is no start of a record.
    """
    header_bytes, _, payload_bytes, _ = _read_prefix(first_page, encrypted=True)
    return header_bytes, header_bytes + payload_bytes


def read_header(view: memoryview) -> RecordHeader:
    """The header, proven by its own checksum; `view` holds all of the header's bytes or more.

    Raises:
        ChunkCorruptError: The bytes are no header, or not all of it.
    """
    header_bytes, packed_bytes, payload_bytes, checksum = _read_prefix(view)
    if len(view) < header_bytes:
        raise _corrupt("length", f"{len(view)} bytes do not hold a header of {header_bytes}")
    header = view[:header_bytes]
    if _header_checksum(header) != checksum:
        raise _corrupt("header", "the header's checksum is wrong")
    fields = _unpack(header[_PREFIX.size : _PREFIX.size + packed_bytes])
    shape = _field(fields, "shape", tuple)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise _corrupt("header", f"shape is {shape!r}")
    tokens = _field(fields, "tokens", bytes)
    if len(tokens) % 4 != 0:
        raise _corrupt("header", f"tokens have {len(tokens)} bytes")
    return RecordHeader(
        version=VERSION,
        key=ChunkKey(_field(fields, "key", bytes)),
        namespace=_field(fields, "namespace", str),
        request_namespace=_field(fields, "request_namespace", str),
        tokens=np.frombuffer(tokens, dtype="<i4"),
        extra=_field(fields, "extra", str),
        layout=_field(fields, "layout", str),
        dtype=_field(fields, "dtype", str),
        shape=shape,
        header_bytes=header_bytes,
        payload_bytes=payload_bytes,
        checksum=_field(fields, "checksum", bytes),
    )


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
        raise _corrupt("length", f"the record has {len(view)} bytes, its header says {record_bytes}")
    if header.key != chunk.key:
        raise _corrupt("key", f"the record is of key {header.key.hex()}, not {chunk.key.hex()}")
    if header.namespace != format.namespace or header.request_namespace != _bounded(request_namespace):
        raise _corrupt("namespace", f"the record of key {chunk.key.hex()} is of another namespace")
    # Equal keys and other tokens: a hash collision. Bytes are compared, so nothing is left to chance.
    if _token_bytes(header.tokens) != _token_bytes(chunk.tokens) or header.extra != _bounded(chunk.extra):
        raise _corrupt("tokens", f"the record of key {chunk.key.hex()} is of other tokens")
    if header.layout != format.layout or header.dtype != format.dtype:
        raise _corrupt("layout", f"the record is {header.dtype} {header.layout}, not {format.layout}")
    if payload and xxhash.xxh3_128_digest(view[header.header_bytes :]) != header.checksum:
        raise _corrupt("checksum", f"the payload of key {chunk.key.hex()} is not what was sealed")
    return header


def _read_prefix(view: memoryview, *, encrypted: bool = False) -> tuple[int, int, int, bytes]:
    """Header bytes, msgpack bytes, payload bytes and checksum; the sizes are within bounds.

    Args:
        view: The first page or more.
        encrypted: Whether the record may be encrypted.
    """
    if len(view) < PAGE:
        raise _corrupt("length", f"{len(view)} bytes do not hold a record's first page")
    magic, version, header_bytes, packed_bytes, payload_bytes, checksum = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise _corrupt("magic", "the bytes do not start as a record")
    if version == VERSION | ENCRYPTED and not encrypted:
        raise _corrupt("encrypted", "the record is encrypted, and this engine has no key")
    if version & ~ENCRYPTED != VERSION:
        raise _corrupt("version", f"the record is of version {version}, not {VERSION}")
    if header_bytes % PAGE != 0 or not PAGE <= header_bytes <= MAX_HEADER_BYTES:
        raise _corrupt("length", f"the header would have {header_bytes} bytes")
    if packed_bytes > header_bytes - _PREFIX.size:
        raise _corrupt("length", f"{packed_bytes} bytes of fields do not fit a header of {header_bytes}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise _corrupt("length", f"the payload would have {payload_bytes} bytes")
    return header_bytes, packed_bytes, payload_bytes, checksum


def _header_checksum(header: memoryview) -> bytes:
    digest = xxhash.xxh3_64(header[: _CHECKSUM.start])
    digest.update(bytes(8))
    digest.update(header[_CHECKSUM.stop :])
    return digest.digest()


def _unpack(packed: memoryview) -> dict[Any, Any]:
    try:
        fields = msgpack.unpackb(
            packed,
            use_list=False,
            unicode_errors="surrogatepass",
            max_str_len=len(packed),
            max_bin_len=len(packed),
            max_array_len=_MAX_DIMENSIONS,
            max_map_len=16,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise _corrupt("header", f"the fields cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise _corrupt("header", f"the fields are a {type(fields).__name__}")
    return fields


_T = TypeVar("_T")


def _field(fields: dict[Any, Any], name: str, kind: type[_T]) -> _T:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise _corrupt("header", f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _token_bytes(tokens: Tokens) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


def _bounded(text: str) -> str:
    """The text, or its digest where it is long; never the same for two texts."""
    data = _utf8(text)
    if len(data) <= _MAX_TEXT_BYTES and not text.startswith("sha256:"):
        return text
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a salt may be any str


def _corrupt(cause: str, message: str) -> ChunkCorruptError:
    return ChunkCorruptError(message, cause=cause)
