"""RESP2 of Redis and Valkey: encoding of commands, parsing of replies, queue of waiters. No I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_LINE = 64 << 10
MAX_BULK = 16 << 20
MAX_ELEMENTS = 1 << 20
MAX_DEPTH = 8


class ProtocolError(Exception):
    """The received bytes are not a valid reply; the connection is unusable."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply.

    Attributes:
        code: First word of the reply, such as OOM or MOVED.
        text: The whole reply.
    """

    code: str
    text: str


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


def encode(*arguments: bytes) -> bytes:
    """Encode a command."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def encode_each(command: bytes, arguments: Iterable[bytes]) -> bytes:
    """Encode the command once for each argument, as one message."""
    head = b"*2\r\n$%d\r\n%b\r\n" % (len(command), command)
    return b"".join([b"%b$%d\r\n%b\r\n" % (head, len(argument), argument) for argument in arguments])


def encode_head(*arguments: bytes, nbytes: int, after: int) -> bytes:
    """Encode the start of a command, up to the header of a long argument.

    Args:
        arguments: Arguments before the long one.
        nbytes: Length of the long argument.
        after: Number of arguments after it.
    """
    parts = [b"*%d\r\n" % (len(arguments) + 1 + after)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    parts.append(b"$%d\r\n" % nbytes)
    return b"".join(parts)


def encode_tail(*arguments: bytes) -> bytes:
    """Encode the end of a command, after its long argument."""
    return b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments)


def parse_reply(data: bytearray, start: int, stop: int, depth: int = 0) -> tuple[Reply, int] | None:
    """Parse the reply at `start`; return it with its end, or None if it is incomplete.

    Raises:
        ProtocolError: The bytes are not a reply, or the reply is too large.
    """
    line = find_line(data, start, stop)
    if line is None:
        return None
    text, after = line
    kind, rest = data[start : start + 1], text[1:]
    if kind == b":":
        return _number(rest), after
    if kind == b"+":
        return rest, after
    if kind == b"-":
        return parse_error(rest), after
    if kind == b"$":
        return _parse_bulk(data, _number(rest), after, stop)
    if kind == b"*":
        return _parse_array(data, _number(rest), after, stop, depth)
    raise ProtocolError(f"a reply has the invalid type {bytes(kind)!r}")


def parse_record_header(data: bytearray, start: int, stop: int) -> tuple[int | ErrorReply | None, int] | None:
    """Parse the header of a bulk string.

    Returns:
        The length, None for a miss, or the error reply, with the end of the line; None if the line is
        incomplete.

    Raises:
        ProtocolError: The line is none of these.
    """
    line = find_line(data, start, stop)
    if line is None:
        return None
    text, after = line
    if text[:1] == b"-":
        return parse_error(text[1:]), after
    if text[:1] != b"$":
        raise ProtocolError(f"received {text[:20]!r}, expected a record")
    length = _number(text[1:])
    return None if length == -1 else _checked(length, 1 << 40), after


def find_line(data: bytearray, start: int, stop: int) -> tuple[bytes, int] | None:
    """Return the line at `start` without its end, and the start of the next one; None if it is incomplete."""
    end = data.find(b"\r\n", start, stop)
    if end < 0:
        if stop - start > MAX_LINE:
            raise ProtocolError(f"a line has more than {MAX_LINE} bytes")
        return None
    if end == start:
        raise ProtocolError("received an empty line, expected a reply")
    return bytes(data[start:end]), end + 2


def parse_error(text: bytes) -> ErrorReply:
    words = text.decode("utf-8", "replace")
    return ErrorReply(words.partition(" ")[0], words)


def _parse_bulk(data: bytearray, length: int, start: int, stop: int) -> tuple[Reply, int] | None:
    if length == -1:
        return None, start
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
        one = parse_reply(data, at, stop, depth + 1)
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

Length: TypeAlias = "int | ErrorReply | None"
"""Length of a record, None for a miss, or the error reply."""

MakeError: TypeAlias = Callable[[], Exception]
"""Creates an error for each waiter. A shared error would collect the tracebacks of all waiters."""


class Replies:
    """Waiter for the next `count` short replies."""

    __slots__ = ("count", "done", "got")

    def __init__(self, count: int) -> None:
        self.count = count
        self.got: list[Reply] = []
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()

    def fail(self, make_error: MakeError) -> None:
        _fail(self.done, make_error)


class Record:
    """Waiter for a record: first its length, then its bytes, in memory that the waiter provides."""

    __slots__ = ("done", "length")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.length: asyncio.Future[Length] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()

    def fail(self, make_error: MakeError) -> None:
        _fail(self.length, make_error)
        _fail(self.done, make_error)


class Reader:
    """Receive buffers and the queue of waiters.

    A record is received directly into the memory provided for it. While `paused`, nothing may be read.
    """

    def __init__(self) -> None:
        self._expected: deque[Replies | Record] = deque()
        self._small = bytearray(SMALL_BYTES)
        self._start = 0  # of the bytes in `_small` that are not parsed yet
        self._stop = 0
        self._body: memoryview | None = None  # memory for the rest of the record
        self._filled = 0
        self._ends = False  # the record is complete, the CRLF after it is not

    @property
    def idle(self) -> bool:
        """Whether no reply is expected and no byte is left over."""
        return not self._expected and self._start == self._stop

    @property
    def paused(self) -> bool:
        """Whether the next bytes belong to a record whose memory was not provided yet."""
        head = self._expected[0] if self._expected else None
        return isinstance(head, Record) and head.length.done() and self._body is None and not self._ends

    def expect(self, what: Replies | Record) -> None:
        self._expected.append(what)

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._body is not None:
            return self._body[self._filled :]
        return memoryview(self._small)[self._stop :]

    def received(self, nbytes: int) -> None:
        """Process bytes received into the last buffer.

        Raises:
            ProtocolError: The bytes do not answer the commands.
        """
        if self._body is not None:
            self._filled += nbytes
            self._check_filled()
            return
        self._stop += nbytes
        self._take()

    def take_record(self, memory: memoryview) -> None:
        """Provide the memory for the record; ends `paused`.

        Raises:
            ProtocolError: As for `received`.
        """
        self._body = memory
        self._filled = min(len(memory), self._stop - self._start)
        memory[: self._filled] = memoryview(self._small)[self._start : self._start + self._filled]
        self._start += self._filled
        self._check_filled()
        self._take()

    def fail(self, make_error: MakeError) -> None:
        """Fail all waiters. No memory of theirs is written any more."""
        self._body = None
        expected, self._expected = self._expected, deque()
        for one in expected:
            one.fail(make_error)

    def _check_filled(self) -> None:
        if self._body is not None and self._filled == len(self._body):
            self._body = None
            self._ends = True

    def _take(self) -> None:
        """Hand complete replies in the small buffer to their waiters."""
        while self._start < self._stop and self._body is None and not self.paused:
            if not self._expected:
                text = bytes(self._small[self._start : min(self._stop, self._start + 200)])
                raise ProtocolError(f"received {text!r} without a request")
            head = self._expected[0]
            if not (self._take_reply(head) if isinstance(head, Replies) else self._take_record(head)):
                break
        self._make_room()

    def _take_reply(self, head: Replies) -> bool:
        found = parse_reply(self._small, self._start, self._stop)
        if found is None:
            return False
        reply, self._start = found
        head.got.append(reply)
        if len(head.got) == head.count:
            self._expected.popleft()
            if not head.done.done():
                head.done.set_result(head.got)
        return True

    def _take_record(self, head: Record) -> bool:
        if self._ends:
            return self._take_end(head)
        found = parse_record_header(self._small, self._start, self._stop)
        if found is None:
            return False
        length, self._start = found
        if not isinstance(length, int):
            self._expected.popleft()
        if not head.length.done():
            head.length.set_result(length)
        return True

    def _take_end(self, head: Record) -> bool:
        if self._stop - self._start < 2:
            return False
        if self._small[self._start : self._start + 2] != b"\r\n":
            raise ProtocolError("a record is not followed by CRLF")
        self._start += 2
        self._ends = False
        self._expected.popleft()
        if not head.done.done():
            head.done.set_result(None)
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


def _fail(future: asyncio.Future[Any], make_error: MakeError) -> None:
    if not future.done():
        future.set_exception(make_error())
        future.exception()  # retrieved: its waiter may have been cancelled
