"""Header of a record: prefix, fields and checksum. The functions are stateless and thread-safe.

The prefix is little-endian: magic, version, sizes, header checksum. A msgpack map follows, then zeros up to
the end of a page. The checksum covers the whole header, with its own bytes as zeros.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import xxhash

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.logging import one_line
from lmcache_async.memory.buffer import PAGE
from lmcache_async.types import ChunkKey, Tokens

VERSION = 1
MAX_HEADER_BYTES = 1 << 20
"""Maximum bytes of a header. A size that was read is compared with it before use."""
MAX_PAYLOAD_BYTES = 1 << 34
MAX_RECORD_BYTES = MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES
MAGIC = b"LMCASYNC"
ENCRYPTED = 1 << 15
"""Flag in the version of an encrypted record; see encryption.py."""

PREFIX = struct.Struct("<8sHIIQ8s")  # magic, version, header bytes, msgpack bytes, payload bytes, checksum
CHECKSUM = slice(PREFIX.size - 8, PREFIX.size)
MAX_DIMENSIONS = 8
MAX_MESSAGE_LENGTH = 500

header_digest = xxhash.xxh3_64_digest
"""`header_digest(header)` is the checksum of a header whose own checksum is zeros."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header fields of a record.

    Attributes:
        version: Version of the record format.
        key: Key of the chunk.
        namespace: Namespace text of the engine.
        request_namespace: Text of the namespace of the request, or its SHA-256 (`sha256:...`) if it is longer
            than 512 bytes.
        tokens: Token ids; int32 of shape (num_tokens,), read-only.
        extra: Extra text of the chunk; a longer text as for `request_namespace`.
        layout: Text of the KV layout.
        dtype: Element type of the KV cache.
        shape: Shape of the payload, as given to `seal`.
        header_bytes: Bytes of the header.
        payload_bytes: Bytes of the payload.
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


def peek_sizes(first_page: memoryview) -> tuple[int, int]:
    """Read the sizes of a record, encrypted or not, from its first 4096 bytes.

    The sizes are within bounds, but no checksum is verified.

    Returns:
        Bytes of the header and bytes of the record.

    Raises:
        ChunkCorruptError: The bytes are not the start of a record.
    """
    header_bytes, _, payload_bytes, _ = _read_prefix(first_page, encrypted=True)
    return header_bytes, header_bytes + payload_bytes


def read_header(view: memoryview) -> RecordHeader:
    """Read the header of a record and verify its checksum.

    Args:
        view: The record, or at least its whole header.

    Raises:
        ChunkCorruptError: The header is incomplete, invalid, encrypted, or its checksum is wrong.
    """
    header_bytes, packed_bytes, payload_bytes, checksum = _read_prefix(view)
    if len(view) < header_bytes:
        raise corrupt("length", f"{len(view)} bytes do not hold a header of {header_bytes}")
    header = view[:header_bytes]
    if header_checksum(header) != checksum:
        raise corrupt("header", "the header's checksum is wrong")
    fields = _unpack(header[PREFIX.size : PREFIX.size + packed_bytes])
    shape = _field(fields, "shape", tuple)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise corrupt("header", f"shape is {shape!r}")
    tokens = _field(fields, "tokens", bytes)
    if len(tokens) % 4 != 0:
        raise corrupt("header", f"tokens have {len(tokens)} bytes")
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


def _read_prefix(view: memoryview, *, encrypted: bool = False) -> tuple[int, int, int, bytes]:
    """Return header bytes, msgpack bytes, payload bytes and header checksum; the sizes are within bounds."""
    if len(view) < PAGE:
        raise corrupt("length", f"{len(view)} bytes do not hold a record's first page")
    magic, version, header_bytes, packed_bytes, payload_bytes, checksum = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise corrupt("magic", "the bytes do not start with the magic of a record")
    if version == VERSION | ENCRYPTED and not encrypted:
        raise corrupt("encrypted", "the record is encrypted, and this engine has no key")
    if version & ~ENCRYPTED != VERSION:
        raise corrupt("version", f"the record is of version {version}, not {VERSION}")
    if header_bytes % PAGE != 0 or not PAGE <= header_bytes <= MAX_HEADER_BYTES:
        raise corrupt("length", f"the header would have {header_bytes} bytes")
    if packed_bytes > header_bytes - PREFIX.size:
        raise corrupt("length", f"{packed_bytes} bytes of fields do not fit a header of {header_bytes}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise corrupt("length", f"the payload would have {payload_bytes} bytes")
    return header_bytes, packed_bytes, payload_bytes, checksum


def header_checksum(header: memoryview) -> bytes:
    digest = xxhash.xxh3_64(header[: CHECKSUM.start])
    digest.update(bytes(8))
    digest.update(header[CHECKSUM.stop :])
    return digest.digest()


_T = TypeVar("_T")


def _unpack(packed: memoryview) -> dict[Any, Any]:
    try:
        fields = msgpack.unpackb(
            packed,
            use_list=False,
            unicode_errors="surrogatepass",
            max_str_len=len(packed),
            max_bin_len=len(packed),
            max_array_len=MAX_DIMENSIONS,
            max_map_len=16,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise corrupt("header", f"the fields cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise corrupt("header", f"the fields are a {type(fields).__name__}")
    return fields


def _field(fields: dict[Any, Any], name: str, kind: type[_T]) -> _T:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise corrupt("header", f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def corrupt(cause: str, message: str) -> ChunkCorruptError:
    """Return the error of a record. Parts of `message` may come from the record, so it is made one short printable line."""
    return ChunkCorruptError(one_line(message)[:MAX_MESSAGE_LENGTH], cause=cause)
