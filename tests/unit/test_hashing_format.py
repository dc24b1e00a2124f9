"""The format of keys: the documented messages, and golden keys that detect changes."""

from __future__ import annotations

import struct

import pytest

from lmcache_async.hashing import ChunkHasher, Extra, digest_function

ROOT = b"0123456789abcdef"


def test_the_messages_are_the_documented_ones():
    digest = digest_function("sha256")
    one = ChunkHasher(ROOT, chunk_size=4, algorithm="sha256", extras=[Extra(5, 6, "cat")])

    keys = one.extend_keys([1, 2, 3, 4, 5, 6, 7, 8, 9])

    text = b'[[1,2,"cat"]]'
    first = digest(ROOT + struct.pack("<4i", 1, 2, 3, 4))
    second = digest(
        first + struct.pack("<4i", 5, 6, 7, 8) + text + struct.pack("<II", len(text), 4 | 1 << 31)
    )
    assert keys == [first, second]
    assert one.tail().key == digest(second + struct.pack("<iII", 9, 0, 1 | 1 << 31))


@pytest.mark.parametrize(
    ("algorithm", "full", "imaged", "partial"),
    [
        (
            "blake3",
            "260e848cfec5367f4f3080a9d5ce25c4",
            "1d29ba635b38aab2f3dc90799d209e4b",
            "0769a0da48971d37718b70e1582c56eb",
        ),
    ],
)
def test_the_keys_are_the_golden_ones(algorithm, full, imaged, partial):
    """A change here makes all stored records unreachable, so it requires a new format_version."""
    one = ChunkHasher(ROOT, chunk_size=256, algorithm=algorithm, extras=[Extra(300, 310, "é")])

    chunks = one.extend(range(100, 100 + 600))

    assert [chunk.key.hex() for chunk in chunks] == [full, imaged]
    assert one.tail().key.hex() == partial


def test_a_partial_chunks_message_never_reads_as_a_full_one():
    """The trailer of a chunk with extras, parsed as tokens, would have a negative one: no message is shared."""
    messages = []
    recorder = ChunkHasher(ROOT, chunk_size=4, extras=[Extra(0, 9, "cat")])
    recorder._digest = lambda message: messages.append(message) or message[:16]

    recorder.extend([1, 2, 3, 4, 5, 6])
    recorder.tail()

    assert [struct.unpack("<i", message[-4:])[0] for message in messages] == [4 - 2**31, 2 - 2**31]
    assert [message[16:24] for message in messages] == [struct.pack("<2i", 1, 2), struct.pack("<2i", 5, 6)]
