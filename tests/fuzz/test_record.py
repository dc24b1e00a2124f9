"""Any bytes read as a record give the sealed content or a ChunkCorruptError, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory import header as header_module
from lmcache_async.memory.buffer import PAGE
from lmcache_async.memory.encryption import ENVELOPE_BYTES, RecordCipher, is_encrypted
from lmcache_async.memory.header import peek_sizes, read_header
from lmcache_async.memory.record import RecordFormat, is_sealed, seal, verify, verify_stored
from lmcache_async.testing.records import chunk_of, key_of, payload_of
from tests.fuzz.damage import Damage, apply, bounded_memory, damages, flip
from tests.fuzz.effort import effort, keep_at_it

FORMAT = RecordFormat(
    namespace='{"model":"m"}', layout="planes=2", dtype="uint8", chunk_size=16, reserved_bytes=ENVELOPE_BYTES
)
CIPHER = RecordCipher([bytes(range(32))])
MAX_BYTES = 1 << 20
"""Memory limit for parsing a record of about 14 KiB, whatever its header claims."""


def sealed(number: int, payload_bytes: int = 10_000) -> bytes:
    data = bytearray(FORMAT.record_bytes(payload_bytes))
    data[FORMAT.header_bytes :] = payload_of(number, payload_bytes)
    with memoryview(data) as view:
        seal(
            view,
            format=FORMAT,
            chunk=chunk_of(number),
            request_namespace="r",
            shape=(payload_bytes,),
            payload_bytes=payload_bytes,
        )
    return bytes(data)


def encrypted(data: bytes, number: int) -> bytes:
    into = bytearray(len(data))
    CIPHER.encrypt(memoryview(data), memoryview(into), key_of(number))
    return bytes(into)


OURS, OTHERS = sealed(1), sealed(2, 3000)
OURS_ENCRYPTED, OTHERS_ENCRYPTED = encrypted(OURS, 1), encrypted(OTHERS, 2)
WANTED: dict[str, Any] = {"format": FORMAT, "chunk": chunk_of(1), "request_namespace": "r"}
CAUSES = {
    "magic",
    "version",
    "length",
    "header",
    "key",
    "namespace",
    "tokens",
    "layout",
    "checksum",
    "encrypted",
}
changes = st.lists(damages(OTHERS), max_size=4)


def in_pieces(data: bytes, size: int = PAGE) -> Iterator[memoryview]:
    """Pieces in one reused buffer, like those of a file that is read."""
    scratch = bytearray(size)
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        scratch[: len(piece)] = piece
        yield memoryview(scratch)[: len(piece)]


def accepts(parse: Callable[[memoryview], object], data: bytes) -> bool:
    """Whether no ChunkCorruptError is raised; other errors propagate."""
    try:
        parse(memoryview(data))
    except ChunkCorruptError as error:
        doubt = error.cause, str(error)
    else:
        return True
    assert doubt[0] in CAUSES
    assert len(doubt[1]) < 2000
    return False


def check_parsers(data: bytes) -> None:
    """Each parser returns its content or raises ChunkCorruptError. A proof ignores the bytes after it."""
    accepts(peek_sizes, data)
    accepts(read_header, data)
    if accepts(lambda _: verify_stored(in_pieces(data), key=key_of(1)), data):
        records = [OURS, OURS_ENCRYPTED, OTHERS_ENCRYPTED]
        assert any(_without_secrets(data[: len(record)]) == _without_secrets(record) for record in records)


def _without_secrets(record: bytes) -> bytes:
    """Fields without key id, nonce and tag, which only the owner of the key can verify."""
    if not is_encrypted(memoryview(record)):
        return record
    return record[:26] + record[58:74] + record[ENVELOPE_BYTES:]


@pytest.mark.parametrize("payload", [True, False])
def test_any_change_of_a_record(payload):
    @effort
    @given(changes)
    @example([flip(100, 1)])
    @example([flip(len(OURS) - 1, 128)])
    @example([lambda data: data[:-1]])
    def check(changes: list[Damage]) -> None:
        data = apply(changes, OURS)
        with bounded_memory(MAX_BYTES):
            check_parsers(data)
            is_ours = accepts(lambda view: verify(view, **WANTED, payload=payload), data)
            sealed = is_sealed(
                data[: FORMAT.header_bytes],
                memoryview(data)[FORMAT.header_bytes :] if payload else None,
                **WANTED,
                shape=(10_000,),
                payload_bytes=len(data) - FORMAT.header_bytes,
            )
        proven = len(OURS) if payload else FORMAT.header_bytes
        assert is_ours == sealed == (len(data) == len(OURS) and data[:proven] == OURS[:proven])

    keep_at_it(check)


@given(st.sampled_from([OURS, OURS_ENCRYPTED]), st.integers(1, 6), st.binary(max_size=5000))
def test_a_whole_record_is_proven_in_pieces_of_any_size_whatever_is_behind_it(record, pages, behind):
    assert verify_stored(in_pieces(record + behind, pages * PAGE), key=key_of(1)) == len(record)


def test_a_record_under_another_key_is_not_proven():
    with pytest.raises(ChunkCorruptError) as caught:
        verify_stored(in_pieces(OURS), key=key_of(2))
    assert caught.value.cause == "key"


def test_any_bytes_read_as_a_record_give_its_content_or_an_error():
    @effort
    @given(st.binary(max_size=3 * PAGE), st.booleans())
    def check(data: bytes, start_right: bool) -> None:
        data = OURS[:40] + data if start_right else data
        with bounded_memory(MAX_BYTES):
            check_parsers(data)
            with pytest.raises(ChunkCorruptError):
                verify(memoryview(data), **WANTED)

    keep_at_it(check)


deep = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=9), inner, max_size=20),
    max_leaves=40,
)
names = st.sampled_from(
    [
        "key",
        "namespace",
        "request_namespace",
        "tokens",
        "extra",
        "layout",
        "dtype",
        "shape",
        "checksum",
        "more",
    ]
)
forged = st.one_of(
    st.dictionaries(names, deep).map(msgpack.packb),
    deep.map(msgpack.packb),
    st.binary(max_size=500),
    # Lengths beyond the end: 4 GiB of text, of bytes, of an array, of a map, of an extension.
    st.sampled_from([b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"]).map(
        lambda mark: mark + b"\xff\xff\xff\xf0"
    ),
    st.integers(1, 2000).map(lambda depth: b"\x91" * depth),
)


def test_any_fields_under_a_right_checksum():
    """A writer of a tier can compute the checksum of a header too."""

    @effort
    @given(forged, st.sampled_from([0, 1, 4096, 10_000, 1 << 34]), st.booleans())
    def check(fields: bytes, payload_bytes: int, merged: bool) -> None:
        if merged:
            size = int.from_bytes(OURS[14:18], "little")
            right = msgpack.unpackb(OURS[header_module.PREFIX.size : header_module.PREFIX.size + size])
            try:
                changed = msgpack.unpackb(fields)
            except (ValueError, msgpack.UnpackException):
                return
            if not isinstance(changed, dict):
                return
            fields = msgpack.packb({**right, **changed})
        data = bytearray(2 * PAGE + 10_000)
        fields = fields[: 2 * PAGE - header_module.PREFIX.size]
        with memoryview(data)[: 2 * PAGE] as header:
            header_module.PREFIX.pack_into(
                header, 0, b"LMCASYNC", header_module.VERSION, 2 * PAGE, len(fields), payload_bytes, bytes(8)
            )
            header[header_module.PREFIX.size : header_module.PREFIX.size + len(fields)] = fields
            header[header_module.CHECKSUM] = header_module.header_checksum(header)
        with bounded_memory(MAX_BYTES):
            check_parsers(bytes(data))
            with pytest.raises(ChunkCorruptError):  # its payload is zeros, and its header is longer
                verify(memoryview(data), **WANTED)

    keep_at_it(check)


def test_any_change_of_an_encrypted_record():
    @effort
    @given(st.lists(damages(OTHERS_ENCRYPTED), max_size=4))
    @example([flip(60, 1)])
    @example([flip(len(OURS) - 1, 128)])
    def check(changes: list[Damage]) -> None:
        data = apply(changes, OURS_ENCRYPTED)
        into = bytearray(len(data))
        with bounded_memory(MAX_BYTES):
            check_parsers(data)
            try:
                CIPHER.decrypt(memoryview(data), memoryview(into), key_of(1))
            except ChunkCorruptError:
                assert data != OURS_ENCRYPTED
                return
        # The envelope's checksum is for readers without the key, and not covered by the tag.
        assert bytes(into) == OURS, "other bytes were taken for ours"

    keep_at_it(check)
