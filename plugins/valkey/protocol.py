"""RESP2 of Redis and Valkey: encoding of commands, parsing of replies, queue of waiters. No I/O."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

MAX_LINE = 64 << 10
MAX_BULK = 16 << 20
MAX_RECORD = 1 << 40
MAX_ELEMENTS = 1 << 20
MAX_DEPTH = 8


class ProtocolError(Exception):
    """The received bytes are not a valid reply; the connection is unusable."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply."""

    code: str
    text: str


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


def encode(*arguments: bytes) -> bytes:
    """Encode a command."""
    return b"*%d\r\n%b" % (len(arguments), _strings(arguments))


def encode_each(command: bytes, arguments: Iterable[bytes]) -> bytes:
    """Encode the command once for each argument, as one message."""
    head = b"*2\r\n" + _strings([command])
    return b"".join([b"%b$%d\r\n%b\r\n" % (head, len(argument), argument) for argument in arguments])


def encode_around(before: Iterable[bytes], nbytes: int, after: Iterable[bytes]) -> tuple[bytes, bytes]:
    """Encode a command without one long argument: what is sent before and after its `nbytes` bytes."""
    before, after = tuple(before), tuple(after)
    head = b"*%d\r\n%b$%d\r\n" % (len(before) + 1 + len(after), _strings(before), nbytes)
    return head, b"\r\n" + _strings(after)


def _strings(arguments: Iterable[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])


def parse_reply(
    data: bytearray, start: int, stop: int, *, record: bool = False, depth: int = 0
) -> tuple[Reply, int] | None:
    """Parse the reply at `start`; return it with its end, or None if it is incomplete.

    With `record`, parse only the header of a string, whose length is the result. Raise ProtocolError if the bytes
    are not a reply, or if it is too large.
    """
    line = _find_line(data, start, stop)
    if line is None:
        return None
    text, after = line
    kind, rest = text[:1], text[1:]
    if kind == b"-":
        words = rest.decode("utf-8", "replace")
        return ErrorReply(words.partition(" ")[0], words), after
    if kind == b"$":
        length = _number(rest)
        if length == -1:
            return None, after
        return (_checked(length, MAX_RECORD), after) if record else _parse_bulk(data, length, after, stop)
    if record:
        raise ProtocolError(f"received {text[:20]!r}, expected a record")
    if kind == b":":
        return _number(rest), after
    if kind == b"+":
        return rest, after
    if kind == b"*":
        return _parse_array(data, _number(rest), after, stop, depth)
    raise ProtocolError(f"a reply has the invalid type {kind!r}")


def _find_line(data: bytearray, start: int, stop: int) -> tuple[bytes, int] | None:
    """Return the line at `start` without its end, and the start of the next one; None if it is incomplete."""
    end = data.find(b"\r\n", start, stop)
    if end < 0:
        if stop - start > MAX_LINE:
            raise ProtocolError(f"a line has more than {MAX_LINE} bytes")
        return None
    if end == start:
        raise ProtocolError("received an empty line, expected a reply")
    return bytes(data[start:end]), end + 2


def _parse_bulk(data: bytearray, length: int, start: int, stop: int) -> tuple[Reply, int] | None:
    end = start + _checked(length, MAX_BULK)
    if stop < end + 2:
        return None
    if data[end : end + 2] != b"\r\n":
        raise ProtocolError("a string is not followed by CRLF")
    return bytes(data[start:end]), end + 2


def _parse_array(data: bytearray, count: int, at: int, stop: int, depth: int) -> tuple[Reply, int] | None:
    if count == -1:
        return None, at
    if depth >= MAX_DEPTH:
        raise ProtocolError(f"lists are nested deeper than {MAX_DEPTH}")
    found: list[Reply] = []
    for _ in range(_checked(count, MAX_ELEMENTS)):
        one = parse_reply(data, at, stop, depth=depth + 1)
        if one is None:
            return None
        reply, at = one
        found.append(reply)
    return found, at


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise ProtocolError(f"received {text[:20]!r}, expected a number")
    return int(text)


def _checked(length: int, most: int) -> int:
    if not 0 <= length <= most:
        raise ProtocolError(f"a length is {length}, expected at most {most}")
    return length


SMALL_BYTES = 16 << 10
"""Size of the buffer for headers and short replies. At most this much of a record is copied."""
_MAX_SMALL_BYTES = 2 * MAX_BULK


class Replies:
    """Waiter for the next `count` short replies.

    With `memory`, it is the waiter for a record, which is received into the memory; its reply is its length.
    """

    __slots__ = ("asked_at", "count", "done", "got", "memory")

    def __init__(self, count: int = 1, *, memory: memoryview | None = None) -> None:
        self.count = count
        self.memory = memory  # None at the end, so that nothing refers to the memory
        self.got: list[Reply] = []
        loop = asyncio.get_running_loop()
        self.asked_at = loop.time()
        self.done: asyncio.Future[list[Reply]] = loop.create_future()

    def end(self, error: Exception | None = None) -> None:
        """Pass the replies or the error on."""
        self.memory = None
        if self.done.done():
            return
        if error is None:
            self.done.set_result(self.got)
        else:
            self.done.set_exception(error)
            self.done.exception()  # retrieved: its waiter may have been cancelled


class Reader:
    """Receive buffers and the queue of waiters.

    A record is received directly into the memory of its waiter, except for what arrives together with its header.
    """

    def __init__(self) -> None:
        self._expected: deque[Replies] = deque()
        self._small = bytearray(SMALL_BYTES)
        self._start = 0  # of the bytes in `_small` that are not parsed yet
        self._stop = 0
        self._in_record = False  # until its CRLF is received
        self._body: memoryview | None = None  # memory of the record, until it is full
        self._filled = 0

    @property
    def idle(self) -> bool:
        """Whether no reply is expected and no byte is left over."""
        return not self._expected and self._start == self._stop

    @property
    def asked_at(self) -> float:
        """Loop time of the oldest command that is not answered; infinity if there is none."""
        return self._expected[0].asked_at if self._expected else math.inf

    def expect(self, replies: Replies) -> None:
        self._expected.append(replies)

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._body is not None:
            return self._body[self._filled :]
        return memoryview(self._small)[self._stop :]

    def received(self, nbytes: int) -> None:
        """Process bytes received into the last buffer. Raise ProtocolError if they do not answer the commands."""
        if self._body is not None:
            self._fill(nbytes)
            return
        self._stop += nbytes
        while self._start < self._stop and self._body is None:
            if not (self._take_end() if self._in_record else self._take_reply()):
                break
        self._make_room()

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Fail all waiters, each with an error of its own. No memory of theirs is written any more."""
        self._body = None
        while self._expected:
            self._expected.popleft().end(make_error())

    def _fill(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._body is not None and self._filled == len(self._body):
            self._body = None

    def _take_reply(self) -> bool:
        """Take the next reply, or the header of a record. Return False if it is incomplete."""
        if not self._expected:
            text = bytes(self._small[self._start : min(self._stop, self._start + 200)])
            raise ProtocolError(f"received {text!r} without a request")
        head = self._expected[0]
        found = parse_reply(self._small, self._start, self._stop, record=head.memory is not None)
        if found is None:
            return False
        reply, self._start = found
        head.got.append(reply)
        if head.memory is not None and isinstance(reply, int):
            self._begin_record(head, reply)
        elif len(head.got) == head.count:
            self._expected.popleft().end()
        return True

    def _begin_record(self, head: Replies, length: int) -> None:
        assert head.memory is not None
        if length > len(head.memory):
            head.end()  # its waiter compares the length
            raise ProtocolError(f"a record of {length} bytes does not fit into its memory")
        self._in_record = True
        self._body, self._filled = head.memory[:length], 0
        nbytes = min(length, self._stop - self._start)
        self._body[:nbytes] = memoryview(self._small)[self._start : self._start + nbytes]
        self._start += nbytes
        self._fill(nbytes)

    def _take_end(self) -> bool:
        if self._stop - self._start < 2:
            return False
        if self._small[self._start : self._start + 2] != b"\r\n":
            raise ProtocolError("a record is not followed by CRLF")
        self._start += 2
        self._in_record = False
        self._expected.popleft().end()
        return True

    def _make_room(self) -> None:
        if self._start == self._stop:
            self._start = self._stop = 0
            if len(self._small) > SMALL_BYTES:
                self._small = bytearray(SMALL_BYTES)
        elif self._stop == len(self._small):
            left = self._small[self._start : self._stop]
            if len(left) > _MAX_SMALL_BYTES:
                raise ProtocolError(f"a reply has more than {_MAX_SMALL_BYTES} bytes")
            # A new object: the transport may still have a view of the old one.
            self._small = left + bytearray(max(SMALL_BYTES, len(left)))
            self._start, self._stop = 0, len(left)
