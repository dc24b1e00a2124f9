"""Commands of RESP, from bytes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ARGUMENTS = 512
MAX_COMMAND_BYTES = 16 << 10
"""Of a command, without the record that it may bring."""
_MAX_LINE = 24
_SET_ARGUMENTS = 3


class MalformedError(Exception):
    """What came is no command; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that is there as a whole.

    Attributes:
        verb: In capitals.
        arguments: What follows it.
    """

    verb: str
    arguments: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """SET, up to its value: so many bytes and an end of line follow.

    Attributes:
        name: Under which the value is to be kept.
        nbytes: The value's length; any number of up to 19 digits.
    """

    name: bytes
    nbytes: int


def parse_command(data: bytearray, start: int, stop: int) -> tuple[Command | Put, int] | None:
    """The command that begins at `start` and where it ends; None when it is not whole yet.

    Raises:
        MalformedError: It is none, or larger than any that we answer.
    """
    found = _length(data, start, stop, b"*", MAX_ARGUMENTS)
    if found is None:
        return None
    count, at = found
    if not count:
        raise MalformedError("a command without a word")
    words: list[bytes] = []
    while len(words) < count:
        brings_record = len(words) == 2 and count == _SET_ARGUMENTS and words[0].upper() == b"SET"
        found = _length(data, at, stop, b"$", 10**19 if brings_record else MAX_COMMAND_BYTES)
        if found is None:
            return None
        length, at = found
        if brings_record:
            return Put(words[1], length), at
        end = at + length
        if end + 2 - start > MAX_COMMAND_BYTES:
            raise MalformedError(f"a command of more than {MAX_COMMAND_BYTES} bytes")
        if end + 2 > stop:
            return None
        if data[end : end + 2] != b"\r\n":
            raise MalformedError("an argument does not end where it should")
        words.append(bytes(data[at:end]))
        at = end + 2
    return Command(words[0].upper().decode("ascii", "replace"), tuple(words[1:])), at


def _length(data: bytearray, start: int, stop: int, kind: bytes, most: int) -> tuple[int, int] | None:
    """The number of a line such as `*3` or `$5`, and where the next line begins; None when it is not whole yet."""
    if start < stop and data[start] != kind[0]:
        raise MalformedError(f"expected '{kind.decode()}', got {bytes(data[start : start + 1])!r}")
    end = data.find(b"\r\n", start, min(stop, start + _MAX_LINE))
    if end < 0:
        if stop - start >= _MAX_LINE:
            raise MalformedError("the line of a length is too long")
        return None
    digits = data[start + 1 : end]
    if not digits.isdigit() or int(digits) > most:
        raise MalformedError(f"{bytes(digits)!r} is no length from 0 to {most}")
    return int(digits), end + 2
