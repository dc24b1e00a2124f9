"""A record is verified or corrupt; no bytes give another result."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory import header as header_module
from lmcache_async.memory import record as record_module
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.header import peek_sizes
from lmcache_async.memory.record import RecordFormat, is_sealed, seal, verify
from lmcache_async.types import Chunk, ChunkKey

CAUSES = {"magic", "version", "length", "header", "key", "namespace", "tokens", "layout", "checksum"}
FORMAT = RecordFormat(namespace='{"model":"m"}', layout="planes=2", dtype="bfloat16", chunk_size=16)
CHUNK = Chunk(key=ChunkKey(b"0123456789abcdef"), start=32, tokens=np.arange(16, dtype=np.int32), extra="[1]")
PAYLOAD = bytes(range(256)) * 20

texts = st.text(st.characters(), max_size=700)


def sealed(
    format: RecordFormat = FORMAT, chunk: Chunk = CHUNK, request: str = "r", payload: bytes = PAYLOAD
) -> bytearray:
    data = bytearray(format.record_bytes(len(payload)))
    data[:] = b"\xff" * len(data)  # left by the slab's last user
    data[format.header_bytes :] = payload
    with memoryview(data) as view:
        seal(
            view,
            format=format,
            chunk=chunk,
            request_namespace=request,
            shape=(2, 16),
            payload_bytes=len(payload),
        )
    return data


def is_ours(
    data: bytes | bytearray, *, shape: tuple[int, ...] = (2, 16), payload: bool = True, **wanted: Any
) -> bool:
    header_bytes = wanted["format"].header_bytes
    with memoryview(data) as view:
        return is_sealed(
            bytes(view[:header_bytes]),
            view[header_bytes:] if payload else None,
            shape=shape,
            payload_bytes=len(data) - header_bytes,
            **wanted,
        )


def cause_of(data: bytes | bytearray, **changes: object) -> str:
    wanted = {"format": FORMAT, "chunk": CHUNK, "request_namespace": "r"} | changes
    assert not is_ours(data, **wanted)
    with pytest.raises(ChunkCorruptError) as caught:
        verify(memoryview(data), **wanted)  # type: ignore[arg-type]
    assert caught.value.cause in CAUSES
    return caught.value.cause


@given(texts, texts, texts, st.integers(0, 300), st.binary(max_size=3000))
def test_sealed_records_are_verified_and_parsed(
    namespace: str, request: str, extra: str, num_tokens: int, payload: bytes
) -> None:
    format = RecordFormat(namespace=namespace, layout="l" * num_tokens, dtype="float16", chunk_size=300)
    tokens = np.arange(num_tokens, dtype=np.int32) * 7_000_000
    chunk = Chunk(key=CHUNK.key, start=0, tokens=tokens, extra=extra)

    data = sealed(format, chunk, request, payload)
    header = verify(memoryview(data), format=format, chunk=chunk, request_namespace=request)

    wanted: dict[str, Any] = {"format": format, "chunk": chunk, "request_namespace": request}
    assert is_ours(data, **wanted)
    assert not is_ours(data, shape=(2, 17), **wanted)
    assert np.array_equal(header.tokens, tokens)
    assert (header.namespace, header.layout, header.dtype) == (namespace, format.layout, "float16")
    assert header.shape == (2, 16)
    assert header.checksum == xxhash.xxh3_128_digest(payload)
    assert data[format.header_bytes :] == payload
    assert format.header_bytes % PAGE == 0
    assert peek_sizes(memoryview(data)[:PAGE]) == (format.header_bytes, len(data))


def test_the_header_contains_no_bytes_of_the_former_user_of_the_slab() -> None:
    data = sealed()
    fields_end = header_module.PREFIX.size + int.from_bytes(data[14:18], "little")

    assert not any(data[fields_end : FORMAT.header_bytes])


def test_any_changed_byte_of_the_padding_is_caught() -> None:
    data = sealed()
    data[FORMAT.header_bytes - 1] = 1

    assert cause_of(data, payload=False) == "header"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", "text"),
        ("tokens", b"123"),
        ("tokens", [1, 2]),
        ("shape", [1, -1]),
        ("shape", [True]),
        ("shape", [1.5]),
        ("shape", [1] * 9),
        ("shape", 3),
        ("checksum", None),
        ("layout", b"bytes"),
        ("more", msgpack.ExtType(5, b"x")),
        ("more", [[[[]]]] * 5),
    ],
)
def test_a_forged_field_is_named(name: str, value: object) -> None:
    data = sealed()
    with memoryview(data)[: FORMAT.header_bytes] as header:
        size = int.from_bytes(header[14:18], "little")
        fields = msgpack.unpackb(header[header_module.PREFIX.size : header_module.PREFIX.size + size])
        packed = msgpack.packb({**fields, name: value})
        header[header_module.PREFIX.size : header_module.PREFIX.size + len(packed)] = packed
        header[14:18] = len(packed).to_bytes(4, "little")
        header[header_module.CHECKSUM] = header_module.header_checksum(header)

    if name == "more" and isinstance(value, list):
        # Unknown fields are skipped.
        verify(memoryview(data), format=FORMAT, chunk=CHUNK, request_namespace="r")
    else:
        assert cause_of(data) == "header"


@pytest.mark.parametrize(
    ("offset", "size", "value"),
    [
        (10, 4, 0),  # header bytes
        (10, 4, PAGE + 1),
        (10, 4, 2**32 - PAGE),
        (14, 4, 2**32 - 1),  # msgpack bytes
        (18, 8, 2**64 - 1),  # payload bytes
        (18, 8, header_module.MAX_PAYLOAD_BYTES + 1),
    ],
)
def test_a_size_out_of_bounds_is_refused_before_it_is_used(offset: int, size: int, value: int) -> None:
    data = sealed()
    data[offset : offset + size] = value.to_bytes(size, "little")

    with pytest.raises(ChunkCorruptError) as caught:
        peek_sizes(memoryview(data)[:PAGE])
    assert caught.value.cause == "length"


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("key", {"chunk": dataclasses.replace(CHUNK, key=ChunkKey(b"x" * 16))}),
        ("namespace", {"request_namespace": "other"}),
        ("namespace", {"format": dataclasses.replace(FORMAT, namespace='{"model":"n"}')}),
        ("tokens", {"chunk": dataclasses.replace(CHUNK, tokens=CHUNK.tokens[:-1])}),
        ("tokens", {"chunk": dataclasses.replace(CHUNK, tokens=CHUNK.tokens[::-1])}),
        ("tokens", {"chunk": dataclasses.replace(CHUNK, extra="[2]")}),
        ("layout", {"format": dataclasses.replace(FORMAT, layout="planes=4")}),
        ("layout", {"format": dataclasses.replace(FORMAT, dtype="float16")}),
        ("length", {"format": dataclasses.replace(FORMAT, chunk_size=4096)}),
    ],
)
def test_a_valid_record_of_other_content_is_corrupt(cause: str, changes: dict[str, object]) -> None:
    assert cause_of(sealed(), **changes) == cause


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("dtype", "bf16\nERROR the disk is full"),
        ("layout", "\ud800 cannot be written to a log"),
        ("layout", "long" * 150),
    ],
)
def test_the_message_has_one_printable_line_of_limited_length_whatever_the_record_contains(
    field: str, text: str
) -> None:
    """Other hosts write to a shared tier."""
    data = sealed(dataclasses.replace(FORMAT, **{field: text}))

    with pytest.raises(ChunkCorruptError) as caught:
        verify(memoryview(data), format=FORMAT, chunk=CHUNK, request_namespace="r")

    assert caught.value.cause == "layout"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= header_module.MAX_MESSAGE_LENGTH


def test_a_record_of_another_version_is_corrupt() -> None:
    data = sealed()
    data[8] = 2

    assert cause_of(data) == "version"


def test_without_the_payload_only_the_header_is_proven() -> None:
    data = sealed()
    data[-1] ^= 1

    verify(memoryview(data), format=FORMAT, chunk=CHUNK, request_namespace="r", payload=False)
    assert cause_of(data) == "checksum"


@given(st.text(max_size=3), st.integers(505, 520))
def test_long_texts_that_differ_never_pass_for_each_other(ending: str, length: int) -> None:
    text = "s" * length
    data = sealed(request=text)

    verify(memoryview(data), format=FORMAT, chunk=CHUNK, request_namespace=text)
    assert cause_of(data, request_namespace=text + ending + "x") == "namespace"
    assert (
        cause_of(data, request_namespace=record_module._bounded(text) + "x" * (length <= 512)) == "namespace"
    )


def test_a_chunk_that_does_not_fit_the_format_is_refused() -> None:
    long = dataclasses.replace(CHUNK, tokens=np.zeros(17, dtype=np.int32))
    with pytest.raises(ValueError, match="17 tokens"):
        sealed(chunk=long)


def test_a_payload_that_does_not_fit_the_view_is_refused() -> None:
    data = bytearray(FORMAT.record_bytes(10))
    with pytest.raises(ValueError, match="does not fit"):
        seal(memoryview(data), format=FORMAT, chunk=CHUNK, request_namespace="", shape=(), payload_bytes=11)


def test_a_header_that_would_be_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size is 1000000"):
        _ = dataclasses.replace(FORMAT, chunk_size=1_000_000).header_bytes
