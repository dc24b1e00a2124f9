"""Any bytes at either end of the lookup socket cause a closed connection or a miss; other clients are still served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import tracemalloc
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.engine.loop import LoopThread
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.lookup import Lookup, Query, RankConnection
from lmcache_async.integration.vllm.lookup_server import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Identity,
    LookupServer,
    encode,
)
from tests.fuzz.effort import effort, keep_at_it
from tests.support.request_keys import ONE_GROUP

IDENTITY = Identity(PROTOCOL, b"r" * 16, "xxh3_128", 8, 2)
NAMES = [
    "op",
    "id",
    "keys",
    "runs",
    "lookup_id",
    "epoch",
    "memory_only",
    *asdict(IDENTITY),
]
NAMES += ["count", "pinned", "tiers", "found", "removed", "error"]

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=64)
    | st.sampled_from(["hello", "lookup", "first", "unpin", "clear", "goodbye", "xxh3_128"])
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(leaves, inner, max_size=4)
)
maps = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), leaves | values, max_size=8)
good = st.sampled_from(
    [
        {"id": 1, "op": "hello"},
        {"id": 2, "op": "lookup", "lookup_id": "r#1", "keys": bytes(64), "runs": []},
        {
            "id": 2,
            "op": "lookup",
            "lookup_id": "r#1",
            "keys": bytes(64),
            "runs": [[bytes(32), b"\x01\x00\x01\x00"], [bytes(48), b"\x01\x00\x02\x00"]],
        },
        {"id": 3, "op": "first", "lookup_id": "a", "runs": [[bytes(32), b"\x01\x00\x01\x00"]]},
        {"op": "unpin", "lookup_id": "r#1"},
        {"id": 4, "op": "clear", "epoch": 1, "memory_only": True},
        {"id": 1, **asdict(IDENTITY)},
        {"id": 2, "count": 3, "pinned": 3, "tiers": {"cpu": 3}, "found": [[-1, 0, ""], [-1, 0, ""]]},
        {"op": "goodbye"},
    ]
)
LENGTH = b"\xff\xff\xff\xff"
bombs = st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\x91", b"\x81\xa1a", b"\xc8\xff\xff"])


def packed(value: object) -> bytes:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        body = msgpack.packb(value, unicode_errors="surrogatepass")
        return len(body).to_bytes(4, "little") + body
    return b""


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(packed(draw(good)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4)) or b"\x00"
    return bytes(data)


messages = (
    st.binary(max_size=200)
    | st.builds(framed, st.binary(max_size=200))
    | maps.map(packed)
    | good.map(packed)
    | mutated()
    | st.tuples(bombs, st.integers(1, 2000)).map(
        lambda bomb: framed((bomb[0] + LENGTH[: bomb[0][0] > 0xC0 and 4]) * bomb[1])
    )
    | st.integers(0, 2**32 - 1).map(lambda length: length.to_bytes(4, "little"))
)
conversations = st.lists(messages, min_size=1, max_size=6).map(b"".join)


class Engine:
    """An engine that has every key."""

    async def lookup_keys(self, keys, *, lookup_id=None):
        del lookup_id
        return SimpleNamespace(count=len(keys), by_tier=Counter(cpu=len(keys)), pinned=len(keys), costs=())

    async def first_present(self, runs, *, lookup_id=None):
        del lookup_id
        return SimpleNamespace(position=0, pinned=True, tier="cpu") if runs else None

    def unpin(self, lookup_id):
        assert isinstance(lookup_id, str)


@pytest.fixture(scope="module")
def served():
    """A real server on its own thread."""

    async def clear(epoch: int, memory_only: bool) -> int:
        assert isinstance(epoch, int)
        assert isinstance(memory_only, bool)
        return 0

    directory = Path(tempfile.mkdtemp(prefix="lma"))  # the path of a socket is limited
    path = directory / "s"
    loop = LoopThread("fuzzed")
    server = LookupServer(Engine(), IDENTITY, path, clear=clear)
    loop.submit(server.start()).result()
    yield path
    loop.submit(server.aclose()).result()
    loop.close()
    directory.rmdir()


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(str(path))
    return connection


def converse(path: Path, data: bytes) -> bytes:
    """Send the bytes and return all data from the server, which must then close the connection."""
    with connected(path) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                said += part
        return said


def answers(data: bytes) -> list[dict]:
    found = []
    while data:
        length = int.from_bytes(data[:4], "little")
        found.append(msgpack.unpackb(data[4 : 4 + length]))
        data = data[4 + length :]
    return found


def check_still_serving(path: Path) -> None:
    asked = encode({"id": 7, "op": "lookup", "lookup_id": "x", "keys": bytes(48), "runs": [[b"", b""]]})
    with connected(path) as connection:
        connection.sendall(asked)
        length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")
        answer = msgpack.unpackb(connection.recv(length, socket.MSG_WAITALL))
    assert answer == {
        "id": 7,
        "count": 3,
        "pinned": 3,
        "tiers": {"cpu": 3},
        "costs": b"",
        "found": [[-1, 0, ""]],
    }


def test_the_server_outlives_any_conversation(served):
    @effort
    @given(conversations)
    def check(data):
        for answer in answers(converse(served, data)):
            assert answer.keys() & {"error", "removed", "count", "found", "protocol", "op"}
        check_still_serving(served)

    keep_at_it(check)


@pytest.mark.parametrize(
    "mark", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"], ids=["list", "map", "text", "bytes", "ext"]
)
def test_sizes_from_outside_allocate_nothing(served, mark):
    claimed = (1 << 20).to_bytes(4, "big")  # msgpack's own limit, the size of the message, allows it
    bomb = framed((mark + claimed) * 40 + bytes(1 << 20))
    check_still_serving(served)
    tracemalloc.start()
    try:
        assert converse(served, bomb) == b""
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 8 * len(bomb)
    check_still_serving(served)


def test_a_length_alone_allocates_nothing(served):
    tracemalloc.start()
    try:
        with connected(served) as connection:
            connection.sendall(MAX_MESSAGE_BYTES.to_bytes(4, "little") + b"x")
            check_still_serving(served)  # it waits for the rest meanwhile
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2 << 20


class Changes(list):
    def __call__(self) -> None:
        self.append(None)


async def hear(data: bytes) -> RankConnection:
    """Return a link that received these bytes, possibly with the answer to its `hello`."""
    ours, theirs = socket.socketpair()
    link = RankConnection(0, Path("/fuzzed"), Changes())
    try:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        async with asyncio.timeout(30):
            await link.serve(reader, writer)
    finally:
        theirs.close()
        ours.close()
    return link


def test_the_client_survives_any_answer_of_a_server():
    @effort
    @given(conversations)
    def check(data):
        link = asyncio.run(hear(data))

        assert link.identity is None  # the connection is lost
        assert not link._waiting

    keep_at_it(check)


def test_the_client_accepts_only_complete_identities():
    @effort
    @given(maps | good)
    def check(message):
        try:
            identity = Identity.of(message)
        except ValueError:
            return
        assert len(identity.root) == 16
        assert identity.chunk_size >= identity.block_size >= 1

    keep_at_it(check)


class Rank:
    """A link whose rank sends given answers."""

    def __init__(self, replies):
        self.replies = iter(replies)

    async def call(self, message):
        del message
        return next(self.replies, None)


def test_an_answer_longer_than_the_query_is_cut():
    replies = (
        st.none()
        | maps
        | st.fixed_dictionaries(
            {
                "count": st.integers(-2, 6) | leaves,
                "pinned": st.integers(-2, 6) | leaves,
                "costs": st.just(b"") | leaves,
                "found": st.lists(st.lists(st.integers(-3, 6), max_size=3) | leaves, max_size=3) | leaves,
                "tiers": values,
            }
        )
    )

    @effort
    @given(st.lists(st.lists(replies, max_size=3), min_size=2, max_size=2))
    def check(said):
        chain = RequestKeys("r", list(range(37)), 37)
        chain.open([b"0" * 16, b"1" * 16], IDENTITY, "")
        chain.extend(37, lambda: None)
        lookup = Lookup("r#1", 37, 0, 0.0, 0)
        try:
            answer = asyncio.run(
                Query([Rank(one) for one in said], ONE_GROUP)(chain, lookup, chain.end_candidates())
            )
        except ValueError:
            return
        assert 0 <= answer.chunks <= 4
        assert 0 <= answer.chunks * 8 + answer.partial_tokens <= 37
        assert all(type(count) is int for count in answer.tiers.values())

    keep_at_it(check)
