"""A scrub's proof: what is whole and unchanged passes, in pieces of any size; nothing else does."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.encryption import ENVELOPE_BYTES, RecordCipher
from lmcache_async.memory.proof import prove
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.testing.records import chunk_of, key_of, payload_of

FORMAT = RecordFormat(namespace="n", layout="l", dtype="uint8", chunk_size=16, reserved_bytes=ENVELOPE_BYTES)
PAYLOAD_BYTES = 9000


def plain(number: int = 1) -> bytearray:
    data = bytearray(FORMAT.record_bytes(PAYLOAD_BYTES))
    data[FORMAT.header_bytes :] = payload_of(number, PAYLOAD_BYTES)
    with memoryview(data) as view:
        seal(
            view,
            format=FORMAT,
            chunk=chunk_of(number),
            request_namespace="",
            shape=(PAYLOAD_BYTES,),
            payload_bytes=PAYLOAD_BYTES,
        )
    return data


def encrypted() -> bytearray:
    data = bytearray(len(plain()))
    with memoryview(plain()) as source, memoryview(data) as into:
        RecordCipher([bytes(range(32))]).encrypt(source, into, key_of(1))
    return data


RECORDS = {"plain": bytes(plain()), "encrypted": bytes(encrypted())}
kinds = st.sampled_from(sorted(RECORDS))


def in_pieces(data: bytes, size: int) -> Iterator[memoryview]:
    """As a file is read: one buffer, overwritten each time."""
    scratch = bytearray(size)
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        scratch[: len(piece)] = piece
        yield memoryview(scratch)[: len(piece)]


@given(kind=kinds, pages=st.integers(1, 6), behind=st.binary(max_size=5000))
def test_a_whole_record_is_proven_whatever_is_behind_it(kind: str, pages: int, behind: bytes) -> None:
    data = RECORDS[kind]

    assert prove(in_pieces(data + behind, pages * 4096), key=key_of(1)) == len(data)


@given(kind=kinds, position=st.integers(0, len(RECORDS["plain"]) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_found(kind: str, position: int, flip: int) -> None:
    data = bytearray(RECORDS[kind])
    data[position] ^= flip
    if kind == "encrypted" and (26 <= position < 58 or 74 <= position < 90):
        return  # the key's id, the nonce and the tag: only the key's owner can tell
    with pytest.raises(ChunkCorruptError):
        prove(in_pieces(bytes(data), 4096), key=key_of(1))


@given(kind=kinds, length=st.integers(0, len(RECORDS["plain"]) - 1))
@example("plain", 0)
def test_any_record_cut_short_is_found(kind: str, length: int) -> None:
    with pytest.raises(ChunkCorruptError) as caught:
        prove(in_pieces(RECORDS[kind][:length], 4096), key=key_of(1))
    assert caught.value.cause == "length"


def test_a_record_under_another_key_is_found() -> None:
    with pytest.raises(ChunkCorruptError) as caught:
        prove([memoryview(RECORDS["plain"])], key=key_of(2))
    assert caught.value.cause == "key"


@given(st.binary(max_size=9000))
def test_bytes_that_are_no_record_are_never_proven(data: bytes) -> None:
    with pytest.raises(ChunkCorruptError):
        prove(in_pieces(data, 4096), key=key_of(1))
