"""Replies split into any pieces, and bytes that are no reply; without a server."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.plugins.valkey.protocol import (
    MAX_BULK,
    MAX_LINE,
    SMALL_BYTES,
    ErrorReply,
    ProtocolError,
    Reader,
    Replies,
    encode,
    encode_around,
    encode_each,
    parse_reply,
)

WORDS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=20)
REPLIES = st.recursive(
    st.integers(-(1 << 62), 1 << 62)
    | st.binary(max_size=100)
    | st.none()
    | st.builds(lambda code, text: ErrorReply(code, f"{code} {text}"), WORDS, WORDS),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)
RECORDS = st.integers(0, 3 * SMALL_BYTES) | st.none() | st.just(ErrorReply("LOADING", "LOADING wait"))
EXPECTED = st.lists(
    st.tuples(st.just("replies"), st.lists(REPLIES, min_size=1, max_size=4))
    | st.tuples(st.just("record"), RECORDS),
    min_size=1,
    max_size=5,
)


def wire(reply: object) -> bytes:
    """Encode a reply like a server."""
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case ErrorReply():
            return b"-" + reply.text.encode() + b"\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(wire, reply))
    raise AssertionError(reply)


def content(length: int) -> bytes:
    return bytes(range(251)) * (length // 251) + bytes(range(length % 251))


def feed(reader: Reader, data: bytes, sizes: list[int]) -> None:
    """Feed the data in pieces of these sizes, like a transport."""
    at, turn = 0, 0
    while at < len(data):
        view = reader.get_buffer()
        assert len(view) > 0
        size = min(len(view), sizes[turn % len(sizes)], len(data) - at)
        view[:size] = data[at : at + size]
        view.release()
        reader.received(size)
        at, turn = at + size, turn + 1


def record_waiter(nbytes: int = 1 << 20) -> tuple[Replies, bytearray]:
    memory = bytearray(nbytes)
    return Replies(memory=memoryview(memory)), memory


@given(
    asked=EXPECTED,
    sizes=st.lists(st.integers(1, 7) | st.integers(1, 2 * SMALL_BYTES), min_size=1, max_size=20),
)
def test_replies_in_any_pieces_reach_their_callers(asked, sizes):
    async def run() -> None:
        reader = Reader()
        waiting: list[tuple[Replies, bytearray]] = []
        data = b""
        for kind, value in asked:
            if kind == "replies":
                assert isinstance(value, list)
                waiting.append((Replies(len(value)), bytearray()))
                data += b"".join(map(wire, value))
            else:
                waiting.append(record_waiter(4 * SMALL_BYTES))
                data += wire(content(value) if isinstance(value, int) else value)
            reader.expect(waiting[-1][0])

        feed(reader, data, sizes)

        assert reader.idle
        for (one, memory), (kind, value) in zip(waiting, asked, strict=True):
            assert one.memory is None
            assert one.done.result() == (value if kind == "replies" else [value])
            if kind == "record" and isinstance(value, int):
                assert memory == content(value) + bytes(len(memory) - value)

    asyncio.run(run())


@given(
    noise=st.binary(min_size=1, max_size=200)
    | st.lists(REPLIES, min_size=1).map(lambda r: b"".join(map(wire, r))),
    damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    records=st.booleans(),
)
def test_any_bytes_are_answers_or_a_protocol_error(noise, damage, sizes, records):
    async def run() -> None:
        data = bytearray(noise)
        for place, value in damage:
            data[place % len(data)] = value
        reader = Reader()
        waiting = [record_waiter()[0] if records else Replies(2) for _ in range(3)]
        for one in waiting:
            reader.expect(one)
        with contextlib.suppress(ProtocolError):
            feed(reader, bytes(data), sizes)
        reader.fail(lambda: RuntimeError("of this test"))
        assert all(one.done.done() and one.memory is None for one in waiting)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        *(b"?\r\n", b"\r\n", b":x\r\n", b":\r\n", b"$-2\r\n", b"*-2\r\n", b":1_0\r\n", b": 1\r\n"),
        *(
            b"$3\r\nabcde",
            b"$%d\r\n" % (MAX_BULK + 1),
            b"*99999999999\r\n",
            b"*1\r\n" * 20,
            b"+" * (MAX_LINE + 2),
        ),
    ],
)
def test_invalid_replies_are_refused(data):
    with pytest.raises(ProtocolError):
        parse_reply(bytearray(data))


async def test_unsolicited_replies_are_refused_with_their_text():
    with pytest.raises(ProtocolError, match="max number of clients"):
        feed(Reader(), b"-ERR max number of clients reached\r\n", [100])


async def test_a_record_that_does_not_end_where_it_should_is_refused():
    reader = Reader()
    reader.expect(record_waiter()[0])
    with pytest.raises(ProtocolError, match="not followed by CRLF"):
        feed(reader, b"$3\r\nabcd\r\n", [100])


async def test_a_record_longer_than_its_memory_is_refused_and_its_waiter_gets_the_length():
    reader = Reader()
    waiter, memory = record_waiter(3)
    reader.expect(waiter)
    with pytest.raises(ProtocolError, match="4 bytes does not fit"):
        feed(reader, b"$4\r\nabcd\r\n", [100])
    reader.fail(lambda: RuntimeError("of this test"))
    assert (waiter.done.result(), memory) == ([4], bytes(3))


async def test_a_long_list_is_read_without_reading_it_again_for_every_byte():
    reader = Reader()
    replies = Replies()
    reader.expect(replies)
    names = [b"%050d" % number for number in range(5000)]
    feed(reader, wire(names), [SMALL_BYTES])
    assert replies.done.result() == [names]


def test_commands_are_lists_of_strings():
    assert encode(b"GET", b"k") == b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    assert encode_each(b"GET", [b"k", b"ab"]) == encode(b"GET", b"k") + encode(b"GET", b"ab")
    head, tail = encode_around((b"SET", b"k"), 3, (b"PX", b"5"))
    assert head + b"abc" + tail == encode(b"SET", b"k", b"abc", b"PX", b"5")
    assert b"".join(encode_around((b"SET", b"k"), 0, ())) == encode(b"SET", b"k", b"")
