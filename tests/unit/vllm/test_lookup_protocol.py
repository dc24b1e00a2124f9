from __future__ import annotations

import asyncio
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_async.errors import ConfigError
from lmcache_async.integration.vllm.lookup_server import (
    MAX_MESSAGE_BYTES,
    Backlog,
    encode,
    pack_runs,
    receive,
    socket_path,
    unpack_runs,
)
from lmcache_async.types import KEY_BYTES


async def received(data: bytes) -> dict[str, object]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await receive(reader)


async def test_encoded_messages_are_decoded():
    message = {"op": "lookup", "id": 7, "keys": b"\x00\xff", "tiers": {"cpu": 3}}

    assert await received(encode(message)) == message


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), ValueError, "exceeds"),  # before the length is used
        (encode({"op": "hello"})[:-1], EOFError, None),
        (b"\x01\x00\x00\x00\x07", ValueError, "map"),
    ],
)
async def test_a_message_that_is_too_long_truncated_or_not_a_map_is_refused(data, error, match):
    with pytest.raises(error, match=match):
        await received(data)


async def test_keys_in_runs_count_against_the_byte_limit_of_a_connection():
    keys = b"k" * (16 * 60000)
    message = await received(encode({"op": "first", "id": 1, "runs": [pack_runs([keys, keys])]}))

    assert Backlog().add(message) >= 2 * len(keys)


@given(st.lists(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=4), max_size=4))
def test_runs_of_keys_are_unpacked_as_they_were_packed(runs: list[list[bytes]]):
    assert unpack_runs(pack_runs([b"".join(run) for run in runs])) == runs


@pytest.mark.parametrize(
    "packed",
    [
        None,
        [],
        [bytes(KEY_BYTES)],
        [bytes(KEY_BYTES), "1"],
        [bytes(KEY_BYTES), b"\x01"],
        [bytes(KEY_BYTES), b"\x02\x00"],
        [bytes(KEY_BYTES - 1), b"\x01\x00"],
    ],
    ids=["nothing", "no keys", "no counts", "a text", "half a count", "another count", "a part of a key"],
)
def test_values_that_are_not_runs_of_keys_are_refused(packed: object):
    with pytest.raises(ValueError, match="keys"):
        unpack_runs(packed)


def test_engines_and_ranks_have_sockets_of_their_own(socket_dir: Path):
    paths = {socket_path(socket_dir, engine, rank) for engine in ("a", "b" * 500) for rank in (0, 1)}

    assert len(paths) == 4


@pytest.mark.parametrize("linked", [False, True], ids=["open to others", "a link"])
def test_another_directory_in_place_of_the_private_one_is_refused(
    socket_dir: Path, tmp_path: Path, linked: bool
):
    path = socket_path(socket_dir, "e", 0).parent
    if linked:
        path.rmdir()
        path.symlink_to(tmp_path)
    else:
        path.chmod(0o755)

    with pytest.raises(ConfigError, match="socket_dir" if linked else "0700"):
        socket_path(socket_dir, "e", 0)


def test_a_path_too_long_for_a_socket_names_the_option(socket_dir: Path):
    deep = socket_dir / ("d" * 90)
    deep.mkdir()

    with pytest.raises(ConfigError, match=r"vllm\.socket_dir"):
        socket_path(deep, "e", 0)
