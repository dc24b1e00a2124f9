"""Commands of peers in any pieces, and bytes that are none; no connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.daemon.commands import (
    MAX_ARGUMENTS,
    MAX_COMMAND_BYTES,
    Command,
    MalformedError,
    Put,
    parse_command,
)
from lmcache_async.resp.wire import encode, encode_head

WORDS = st.lists(st.binary(max_size=40), max_size=6)
VERBS = st.sampled_from([b"GET", b"exists", b"AUTH", b"x"])


def parsed(data: bytes) -> list[Command | Put]:
    """All that is whole, from the start on."""
    found, at = [], 0
    while (step := parse_command(bytearray(data), at, len(data))) is not None:
        command, at = step
        found.append(command)
    return found


@given(said=st.lists(st.tuples(VERBS, WORDS), max_size=4), cut=st.integers(0, 400))
def test_commands_are_found_once_they_are_whole(said: list[tuple[bytes, list[bytes]]], cut: int) -> None:
    pieces = [encode(verb, *words) for verb, words in said]
    data = b"".join(pieces)[:cut]
    whole = sum(len(b"".join(pieces[: n + 1])) <= len(data) for n in range(len(pieces)))

    assert parsed(data) == [Command(verb.upper().decode(), tuple(words)) for verb, words in said[:whole]]


def test_a_record_is_announced_before_it_is_there() -> None:
    head = encode_head(b"set", b"name", nbytes=1 << 40, after=0)

    assert parsed(b"".join([encode(b"PING"), head])) == [Command("PING", ()), Put(b"name", 1 << 40)]
    assert parse_command(bytearray(head[:-1]), 0, len(head) - 1) is None


def test_set_with_options_is_a_short_command() -> None:
    assert parsed(encode(b"SET", b"k", b"v", b"NX")) == [Command("SET", (b"k", b"v", b"NX"))]


@given(
    noise=st.binary(min_size=1, max_size=100), at=st.integers(0, 60), start=st.sampled_from([b"", b"*2\r\n"])
)
def test_any_bytes_are_commands_or_malformed_or_not_whole(noise: bytes, at: int, start: bytes) -> None:
    data = start + encode(b"EXISTS", b"k" * 32)
    data = data[:at] + noise + data[at:]
    try:
        found = parsed(data)
    except MalformedError:
        return
    assert all(isinstance(command, Command | Put) for command in found)


@pytest.mark.parametrize(
    "data",
    [
        b"PING\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*+1\r\n",
        b"*1_0\r\n",
        b"*\r\n",
        b"*%d\r\n" % (MAX_ARGUMENTS + 1),
        b"*1\r\n:1\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$3\r\nabcde",
        b"*" + b"1" * 24,
        b"*1\r\n$%d\r\n" % (MAX_COMMAND_BYTES + 1),
        b"*2\r\n$1\r\nk\r\n$%d\r\n" % (MAX_COMMAND_BYTES - 5),
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % 10**20,
        b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$20000\r\n",
    ],
)
def test_what_is_no_command_of_ours_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        parsed(data)


def test_a_command_of_many_small_words_is_bounded() -> None:
    words = [b"k" * 60] * MAX_ARGUMENTS
    with pytest.raises(MalformedError, match="a command of more than"):
        parsed(b"*%d\r\n" % MAX_ARGUMENTS + b"".join([b"$60\r\n%b\r\n" % word for word in words]))
