"""Sealed records: header pages and payload, with checksums of both.

A record is a header (see `header`), which contains the checksum of the payload, and the payload. The functions are
stateless and may run in worker threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import xxhash

from lmcache_async.memory.buffer import pages
from lmcache_async.memory.encryption import ENVELOPE_BYTES, envelope_checksum, is_encrypted
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
    header_digest,
    peek_sizes,
    read_header,
)
from lmcache_async.types import KEY_BYTES, Chunk, ChunkKey, Tokens

PIECE_BYTES = MAX_HEADER_BYTES
"""Size of the pieces for `verify_stored`. The first piece contains any header."""

_MAX_TEXT_BYTES = 512  # limit of the texts of a request; longer ones are stored as their digest
_CHECKSUM_BYTES = 16
_TOKEN_TYPE = np.dtype("<i4")
_MAX_TEMPLATES = 16
_MAP_BYTES = 256  # field names, key, checksum, shape and msgpack overhead; 214 at most


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Common properties of all records of an engine.

    Attributes:
        namespace: Namespace text of the engine.
        layout: Text of the KV layout of the payload.
        dtype: Element type of the KV cache.
        chunk_size: Tokens of a full chunk.
        reserved_bytes: Zeros at the end of every header, for the envelope of an encrypted record.
        header_bytes: Bytes before the payload: a multiple of 4096 with room for the header of any chunk.

    Raises:
        ValueError: The header would exceed `MAX_HEADER_BYTES`.
    """

    namespace: str
    layout: str
    dtype: str
    chunk_size: int
    reserved_bytes: int = 0
    header_bytes: int = field(init=False, repr=False)
    # Filled by `template`.
    _templates: dict[Any, HeaderTemplate] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        texts = sum(len(_utf8(text)) for text in (self.namespace, self.layout, self.dtype))
        nbytes = PREFIX.size + _MAP_BYTES + texts + 2 * _MAX_TEXT_BYTES + 4 * self.chunk_size
        nbytes += self.reserved_bytes
        header_bytes = pages(nbytes)
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"a record's header would have {header_bytes} bytes, more than {MAX_HEADER_BYTES}:"
                f" chunk_size is {self.chunk_size}, the texts have {texts} bytes"
            )
        object.__setattr__(self, "header_bytes", header_bytes)

    def record_bytes(self, payload_bytes: int) -> int:
        return self.header_bytes + payload_bytes

    def template(
        self, chunk: Chunk, request_namespace: str, shape: tuple[int, ...], payload_bytes: int
    ) -> HeaderTemplate:
        """Return the header template for records like that of `chunk`.

        Raises:
            ValueError: The chunk or the payload does not fit the format.
        """
        arguments = (len(chunk.tokens), chunk.extra, request_namespace, shape, payload_bytes)
        template = self._templates.get(arguments)
        if template is None:
            template = HeaderTemplate(self, *arguments)
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[arguments] = template
        return template


class HeaderTemplate:
    """Header of records that differ only in key, tokens and checksum. Immutable and thread-safe.

    Attributes:
        checksum_at: Position of the payload checksum in the header.

    Raises:
        ValueError: The chunk or the payload does not fit the format.
    """

    __slots__ = ("_before_key", "_before_tokens", "_rest", "_tail", "checksum_at")

    def __init__(
        self,
        format: RecordFormat,
        num_tokens: int,
        extra: str,
        request_namespace: str,
        shape: tuple[int, ...],
        payload_bytes: int,
    ) -> None:
        if not 0 <= payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload has {payload_bytes} bytes, expected 0 to {MAX_PAYLOAD_BYTES}")
        if num_tokens > format.chunk_size or len(shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"a chunk of {num_tokens} tokens with a payload of shape {shape} exceeds the format's maximum of"
                f" {format.chunk_size} tokens and {MAX_DIMENSIONS} dimensions"
            )
        token_bytes = num_tokens * _TOKEN_TYPE.itemsize
        head = {
            "key": bytes(KEY_BYTES),
            "namespace": format.namespace,
            "request_namespace": _bounded(request_namespace),
            "tokens": bytes(token_bytes),
        }
        tail = {
            "extra": _bounded(extra),
            "layout": format.layout,
            "dtype": format.dtype,
            "shape": shape,
            "checksum": bytes(_CHECKSUM_BYTES),
        }
        fields = _pack(head | tail)
        # msgpack writes the fields one after the other, and the mark of a map of up to 15 fields has one byte.
        key_at = len(_pack({"key": head["key"]})) - KEY_BYTES
        tokens_at = len(_pack(head)) - token_bytes
        prefix = PREFIX.pack(MAGIC, VERSION, format.header_bytes, len(fields), payload_bytes, bytes(8))
        self.checksum_at = len(prefix) + len(fields) - _CHECKSUM_BYTES
        self._before_key = prefix + fields[:key_at]
        self._before_tokens = fields[key_at + KEY_BYTES : tokens_at]
        self._rest = fields[tokens_at + token_bytes : -_CHECKSUM_BYTES]
        self._tail = bytes(format.header_bytes - len(prefix) - len(fields))

    def header(self, chunk: Chunk, checksum: bytes) -> bytearray:
        """Return the header of a record.

        The chunk must have the number of tokens and the extra text of the template.

        Raises:
            ValueError: The key or the payload checksum does not have 16 bytes.
        """
        key = chunk.key
        if len(key) != KEY_BYTES or len(checksum) != _CHECKSUM_BYTES:
            raise ValueError(f"key {key.hex()} or checksum {checksum.hex()} does not have 16 bytes")
        tokens = _token_bytes(chunk.tokens)
        header = bytearray().join(
            (self._before_key, key, self._before_tokens, tokens, self._rest, checksum, self._tail)
        )
        header[CHECKSUM] = header_digest(header)
        return header


def payload_checksum(payload: memoryview) -> bytes:
    """Return the xxh3_128 of a payload, 16 bytes."""
    return xxhash.xxh3_128_digest(payload)


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
    """Write the header of a record whose payload is already in `view[header_bytes:]`.

    Args:
        view: Memory of the record, writable.
        format: Record format of the engine.
        chunk: Chunk of the record.
        request_namespace: Text of the request's namespace.
        shape: Shape of the payload.
        payload_bytes: Bytes of the payload.
        checksum: xxh3_128 of the payload, 16 bytes; None to compute it.

    Raises:
        ValueError: The chunk or the payload does not fit the format or the view.
    """
    header_bytes = format.header_bytes
    stop = header_bytes + payload_bytes
    if stop > len(view):
        raise ValueError(f"a record of {stop} bytes does not fit into {len(view)} bytes of memory")
    checksum = checksum or payload_checksum(view[header_bytes:stop])
    template = format.template(chunk, request_namespace, shape, payload_bytes)
    view[:header_bytes] = template.header(chunk, checksum)


def is_sealed(
    header: bytes,
    payload: memoryview | None,
    *,
    format: RecordFormat,
    chunk: Chunk,
    request_namespace: str,
    shape: tuple[int, ...],
    payload_bytes: int,
) -> bool:
    """Whether a record is, byte for byte, the result of `seal` for this chunk.

    Takes a third of the time of `verify`, which reports the cause of a mismatch.

    Args:
        header: The first `format.header_bytes` bytes of the record, or all bytes of a shorter one.
        payload: The rest of the record; None to verify only the header.
        format: Record format of the engine.
        chunk: Expected chunk.
        request_namespace: Text of the namespace of the request.
        shape: Shape of the payload.
        payload_bytes: Bytes of the payload.
    """
    if len(header) < format.header_bytes:
        return False
    template = format.template(chunk, request_namespace, shape, payload_bytes)
    # The payload checksum is the only field that is not known in advance.
    checksum = header[template.checksum_at : template.checksum_at + _CHECKSUM_BYTES]
    if header != template.header(chunk, checksum):
        return False
    return payload is None or payload_checksum(payload) == checksum


def verify(
    view: memoryview, *, format: RecordFormat, chunk: Chunk, request_namespace: str, payload: bool = True
) -> RecordHeader:
    """Verify that a record is complete, unchanged and of this chunk, and return its header.

    Args:
        view: The whole record and nothing else.
        format: Record format of the engine.
        chunk: Expected chunk. All of it is compared, because the key alone proves nothing.
        request_namespace: Text of the namespace of the request.
        payload: Verify the payload checksum; else only the header.

    Raises:
        ChunkCorruptError: The verification failed.
    """
    header = read_header(view)
    record_bytes = header.header_bytes + header.payload_bytes
    if len(view) != record_bytes or header.header_bytes != format.header_bytes:
        raise corrupt("length", f"the record has {len(view)} bytes, its header says {record_bytes}")
    if header.key != chunk.key:
        raise corrupt("key", f"the record is of key {header.key.hex()}, not {chunk.key.hex()}")
    if header.namespace != format.namespace or header.request_namespace != _bounded(request_namespace):
        raise corrupt("namespace", f"the record of key {chunk.key.hex()} is of another namespace")
    # Equal keys of different tokens are a hash collision, so the tokens themselves are compared.
    if _token_bytes(header.tokens) != _token_bytes(chunk.tokens) or header.extra != _bounded(chunk.extra):
        raise corrupt("tokens", f"the record of key {chunk.key.hex()} is of other tokens")
    if header.layout != format.layout or header.dtype != format.dtype:
        raise corrupt("layout", f"the record is {header.dtype} {header.layout}, not {format.layout}")
    if payload and payload_checksum(view[header.header_bytes :]) != header.checksum:
        raise corrupt("checksum", f"the payload checksum of key {chunk.key.hex()} is wrong")
    return header


def verify_stored(pieces: Iterable[memoryview], *, key: ChunkKey) -> int:
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
            raise corrupt("key", f"the header of record {key.hex()} has the key {header.key.hex()}")
    left, digest = _digest(first[start:], rest, record_bytes - start)
    if left:
        raise corrupt("length", f"record {key.hex()} ends {left} bytes early")
    if digest != checksum:
        raise corrupt("checksum", f"record {key.hex()}: the payload checksum is wrong")
    return record_bytes


def _digest(piece: memoryview, rest: Iterator[memoryview], nbytes: int) -> tuple[int, bytes]:
    """Hash the first `nbytes` bytes of `piece` and `rest`. Return how many of them are missing, and the checksum."""
    digest = xxhash.xxh3_128()
    left = nbytes
    for part in chain((piece,), rest):
        digest.update(part[:left])
        left -= min(left, len(part))
        if not left:
            break
    return left, digest.digest()


def _pack(fields: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
    return packed


def _token_bytes(tokens: Tokens) -> bytes:
    return (tokens if tokens.dtype is _TOKEN_TYPE else tokens.astype(_TOKEN_TYPE)).tobytes()


def _bounded(text: str) -> str:
    """Return the text, or its SHA-256 if it is long. Different texts never give the same result."""
    data = _utf8(text)
    if len(data) <= _MAX_TEXT_BYTES and not text.startswith("sha256:"):
        return text
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a salt may contain lone surrogates
