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


def encode_around(before: tuple[bytes, ...], nbytes: int, after: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """Encode a command with one long argument of `nbytes` bytes. Return the bytes to send before and after it."""
    head = b"*%d\r\n%b$%d\r\n" % (len(before) + 1 + len(after), _strings(before), nbytes)
    return head, b"\r\n" + _strings(after)


def _strings(arguments: Iterable[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments])


def parse_reply(
    data: bytearray, start: int = 0, *, record: bool = False, depth: int = 0
) -> tuple[Reply, int] | None:
    """Parse the reply at `start`. Return the reply and the position after it, or None if it is incomplete.

    With `record`, parse only the header of a bulk string and return its length as the reply. Raise ProtocolError if
    the bytes are not a reply, or if the reply is too large.
    """
    end = data.find(b"\r\n", start)
    if end < 0:
        if len(data) - start > MAX_LINE:
            raise ProtocolError(f"a line has more than {MAX_LINE} bytes")
        return None
    line, end = bytes(data[start:end]), end + 2
    kind, rest = line[:1], line[1:]
    if kind == b"-":
        words = rest.decode("utf-8", "replace")
        return ErrorReply(words.partition(" ")[0], words), end
    if record and kind != b"$":
        raise ProtocolError(f"received {line[:20]!r}, expected a record")
    if kind == b":":
        return _number(rest), end
    if kind == b"+":
        return rest, end
    if kind not in (b"$", b"*"):
        raise ProtocolError(f"a reply has the invalid type {kind!r}")
    length = _number(rest)
    if length == -1:
        return None, end
    most = MAX_ELEMENTS if kind == b"*" else MAX_RECORD if record else MAX_BULK
    if not 0 <= length <= most:
        raise ProtocolError(f"a length is {length}, expected at most {most}")
    if record:
        return length, end
    return _parse_list(data, length, end, depth) if kind == b"*" else _parse_bulk(data, end, end + length)


def _parse_bulk(data: bytearray, start: int, end: int) -> tuple[bytes, int] | None:
    if len(data) < end + 2:
        return None
    if data[end : end + 2] != b"\r\n":
        raise ProtocolError("a string is not followed by CRLF")
    return bytes(data[start:end]), end + 2


def _parse_list(data: bytearray, count: int, at: int, depth: int) -> tuple[list[Reply], int] | None:
    if depth >= MAX_DEPTH:
        raise ProtocolError(f"lists are nested deeper than {MAX_DEPTH}")
    found: list[Reply] = []
    for _ in range(count):
        one = parse_reply(data, at, depth=depth + 1)
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


SMALL_BYTES = 16 << 10
"""Size of the buffer for headers and short replies. At most this much of a record is copied."""
_MAX_LEFT = 2 * MAX_BULK


class Replies:
    """Waiter for the next `count` short replies.

    With `memory`, it waits for one record, which is received into `memory`; the reply is the length of the record.
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
        """Resolve `done` with the replies or the error."""
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
        self._left = bytearray()  # received and not parsed yet
        self._body: memoryview | None = None  # memory for the rest of a record
        self._in_record = False  # until its CRLF is received

    @property
    def idle(self) -> bool:
        """Whether no reply is expected and no byte is left over."""
        return not self._expected and not self._left

    @property
    def asked_at(self) -> float:
        """Loop time of the oldest command that is not answered; infinity if there is none."""
        return self._expected[0].asked_at if self._expected else math.inf

    def expect(self, replies: Replies) -> None:
        self._expected.append(replies)

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes."""
        return memoryview(self._small) if self._body is None else self._body[:]

    def received(self, nbytes: int) -> None:
        """Process bytes received into the last buffer. Raise ProtocolError if they are not replies to the commands."""
        if self._body is not None:
            self._body = self._body[nbytes:] or None
            return
        self._left += memoryview(self._small)[:nbytes]
        start = 0
        while start < len(self._left) and (end := self._take(start)) is not None:
            start = end
        del self._left[:start]
        if len(self._left) > _MAX_LEFT:
            raise ProtocolError(f"a reply has more than {_MAX_LEFT} bytes")

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Fail all waiters, each with a new error. Their memory is not written to any more."""
        self._body = None
        while self._expected:
            self._expected.popleft().end(make_error())

    def _take(self, start: int) -> int | None:
        """Take the next reply, the beginning of a record or its end. Return where it ends; None if it is incomplete."""
        data = self._left
        if self._in_record:
            if len(data) < start + 2:
                return None
            if data[start : start + 2] != b"\r\n":
                raise ProtocolError("a record is not followed by CRLF")
            self._in_record = False
            self._expected.popleft().end()
            return start + 2
        if not self._expected:
            raise ProtocolError(f"received {bytes(data[start : start + 200])!r} without a request")
        head = self._expected[0]
        found = parse_reply(data, start, record=head.memory is not None)
        if found is None:
            return None
        reply, end = found
        head.got.append(reply)
        if head.memory is not None and isinstance(reply, int):
            if reply > len(head.memory):
                head.end()  # its waiter compares the length
                raise ProtocolError(f"a record of {reply} bytes does not fit into its memory")
            nbytes = min(reply, len(data) - end)
            head.memory[:nbytes] = data[end : end + nbytes]
            self._body = head.memory[nbytes:reply] or None
            self._in_record = True
            return end + nbytes
        if len(head.got) == head.count:
            self._expected.popleft().end()
        return end
