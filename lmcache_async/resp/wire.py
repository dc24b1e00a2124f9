"""The wire format, RESP2: commands to bytes, bytes to replies. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

MAX_LINE = 64 << 10
MAX_BULK = 16 << 20
MAX_ELEMENTS = 1 << 20
MAX_DEPTH = 8


class ProtocolError(Exception):
    """What came is no reply; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server refused.

    Attributes:
        code: The first word, such as OOM or MOVED.
        text: All of it.
    """

    code: str
    text: str


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"


def encode(*arguments: bytes) -> bytes:
    """One command."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def encode_each(command: bytes, arguments: Iterable[bytes]) -> bytes:
    """The command once for each argument, as one message."""
    head = b"*2\r\n$%d\r\n%b\r\n" % (len(command), command)
    return b"".join([b"%b$%d\r\n%b\r\n" % (head, len(argument), argument) for argument in arguments])


def encode_head(*arguments: bytes, nbytes: int, after: int) -> bytes:
    """The beginning of a command: `arguments`, then one of `nbytes` bytes, then `after` more that follow."""
    parts = [b"*%d\r\n" % (len(arguments) + 1 + after)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    parts.append(b"$%d\r\n" % nbytes)
    return b"".join(parts)


def encode_tail(*arguments: bytes) -> bytes:
    """The end of a command whose long argument has just been sent."""
    return b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments)


def parse_reply(data: bytearray, start: int, stop: int, depth: int = 0) -> tuple[Reply, int] | None:
    """The reply that begins at `start` and where it ends; None when it is not whole yet.

    Raises:
        ProtocolError: It is none, or larger than any that we ask for.
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
    raise ProtocolError(f"a reply begins with {bytes(kind)!r}")


def parse_record_header(data: bytearray, start: int, stop: int) -> tuple[int | ErrorReply | None, int] | None:
    """The length of the bulk string that begins there, None for a miss, or why not; and where the line ends.

    None in place of the pair when the line is not whole yet.

    Raises:
        ProtocolError: It is none of these.
    """
    line = find_line(data, start, stop)
    if line is None:
        return None
    text, after = line
    if text[:1] == b"-":
        return parse_error(text[1:]), after
    if text[:1] != b"$":
        raise ProtocolError(f"a record was to come, and {text[:20]!r} came")
    length = _number(text[1:])
    return None if length == -1 else _checked(length, 1 << 40), after


def find_line(data: bytearray, start: int, stop: int) -> tuple[bytes, int] | None:
    """The line without its end, and where the next one begins; None when it is not whole yet."""
    end = data.find(b"\r\n", start, stop)
    if end < 0:
        if stop - start > MAX_LINE:
            raise ProtocolError(f"a line of more than {MAX_LINE} bytes")
        return None
    if end == start:
        raise ProtocolError("an empty line in place of a reply")
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
        raise ProtocolError("a string does not end where it should")
    return bytes(data[start:end]), end + 2


def _parse_array(data: bytearray, count: int, at: int, stop: int, depth: int) -> tuple[Reply, int] | None:
    if count == -1:
        return None, at
    if depth >= MAX_DEPTH:
        raise ProtocolError(f"lists in lists, {MAX_DEPTH} deep")
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
        raise ProtocolError(f"{text[:20]!r} is no number")
    return int(text)


def _checked(length: int, most: int) -> int:
    if not 0 <= length <= most:
        raise ProtocolError(f"a length of {length} where {most} is the most")
    return length
