from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from lmcache_async.errors import ConfigError
from lmcache_async.integration.vllm.lookup_server import MAX_MESSAGE_BYTES, encode, receive, socket_path

if TYPE_CHECKING:
    from pathlib import Path


async def received(data: bytes) -> dict[str, object]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await receive(reader)


async def test_encoded_messages_are_decoded():
    message = {"op": "lookup", "id": 7, "keys": b"\x00\xff", "tiers": {"cpu": 3}}

    assert await received(encode(message)) == message


async def test_a_length_from_outside_is_bounded_before_it_is_used():
    with pytest.raises(ValueError, match="exceeds"):
        await received((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


async def test_a_cut_message_is_the_end():
    with pytest.raises(EOFError):
        await received(encode({"op": "hello"})[:-1])


async def test_values_that_are_no_map_are_refused():
    with pytest.raises(ValueError, match="map"):
        await received(b"\x01\x00\x00\x00\x07")


def test_scheduler_and_worker_find_the_same_socket(socket_dir: Path):
    assert socket_path(socket_dir, "engine", 1) == socket_path(socket_dir, "engine", 1)


def test_engines_and_ranks_have_sockets_of_their_own(socket_dir: Path):
    paths = {socket_path(socket_dir, engine, rank) for engine in ("a", "b" * 500) for rank in (0, 1)}

    assert len(paths) == 4


def test_the_directory_is_private(socket_dir: Path):
    assert socket_path(socket_dir, "e", 0).parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_open_to_others_is_refused(socket_dir: Path):
    socket_path(socket_dir, "e", 0).parent.chmod(0o755)

    with pytest.raises(ConfigError, match="0700"):
        socket_path(socket_dir, "e", 0)


def test_a_link_in_place_of_the_directory_is_refused(socket_dir: Path, tmp_path: Path):
    path = socket_path(socket_dir, "e", 0).parent
    path.rmdir()
    path.symlink_to(tmp_path)

    with pytest.raises(ConfigError, match="socket_dir"):
        socket_path(socket_dir, "e", 0)


def test_a_path_too_long_for_a_socket_names_the_option(socket_dir: Path):
    deep = socket_dir / ("d" * 90)
    deep.mkdir()

    with pytest.raises(ConfigError, match=r"vllm\.socket_dir"):
        socket_path(deep, "e", 0)
