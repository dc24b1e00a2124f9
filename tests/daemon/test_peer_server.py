"""What a daemon serves to other hosts: who may, what it says, and where it ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.daemon.commands import MAX_COMMAND_BYTES
from lmcache_async.daemon.peer_options import PeerOptions, Tokens
from lmcache_async.daemon.peers import PeerServer
from lmcache_async.daemon.pool import Pool
from lmcache_async.errors import ConfigError
from lmcache_async.memory.arena import Arena
from lmcache_async.resp.wire import ErrorReply, encode, encode_head
from lmcache_async.testing.records import SLAB_BYTES, key_of, record
from lmcache_async.testing.steps import turns
from tests.daemon.peer_talk import talking, wait_until
from tests.tiers.peer_hosts import DEADLINE_S, Host, running
from tests.tiers.valkey_tls import Authority

TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def shared() -> Iterator[Host]:
    with running() as [host]:
        yield host


@pytest.fixture
def host(shared: Host) -> Host:
    shared.empty()
    return shared


@pytest.fixture(scope="module")
def content() -> bytes:
    """The record of chunk 1."""
    arena = Arena(SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
    with record(arena, 1) as buffer:
        content = bytes(buffer.view)
    arena.close()
    return content


def name(number: int) -> bytes:
    return key_of(number).hex().encode()


def tokens(folder: Path, text: str) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_any_redis_client_can_look_into_a_daemon(host: Host, content: bytes) -> None:
    for protocol in (2, 3):
        client = redis.Redis(port=host.port, protocol=protocol)
        assert client.ping()
        assert client.set(name(1), content)
        assert client.get(name(1)) == content
        assert client.get(name(2)) is None
        assert client.get("somebody's") is None
        assert client.exists(name(1), name(2), "x") == 1
        assert client.strlen(name(1)) == len(content)
        assert list(client.scan_iter()) == [name(1)]
        assert list(client.scan_iter(match="f*")) == []
        assert client.dbsize() == 1
        assert client.info()["db0"] == {"keys": 1}
        assert client.unlink(name(1), name(2)) == 1
        client.close()
    assert host.leases() == 0


def test_every_key_is_scanned_once(host: Host, content: bytes) -> None:
    for number in range(250):
        host.replace(key_of(number), lambda _: content)
    with talking(host) as talk:
        found: list[bytes] = []
        cursor = b"0"
        while True:
            cursor, names = talk.ask(b"SCAN", cursor, b"COUNT", b"40")
            found += names
            host.replace(key_of(1000 + len(found)), lambda _: content)
            if cursor == b"0":
                break
        assert len(found) == len(set(found))
        assert set(found) >= {name(number) for number in range(250)}
        cursor, _ = talk.ask(b"SCAN", b"0")
        for _ in range(20):
            talk.ask(b"SCAN", b"0")
        assert "too old" in talk.refused(b"SCAN", cursor)
    host.empty()


def test_what_it_does_not_know_it_says(host: Host, content: bytes) -> None:
    with talking(host) as talk:
        for words, told in [
            ((b"FLUSHALL",), "unknown command"),
            ((b"GET",), "wrong number"),
            ((b"SET", name(1), b"v", b"NX"), "takes no options"),
            ((b"SET", b"short", content), "a record's name is 32 digits"),
            ((b"SET", name(1), b"no record"), "no record of that length"),
            ((b"SET", name(1), content[:-1]), "no record of that length"),
            ((b"SET", name(1), b""), "a record has 1 to"),
            ((b"SELECT", b"3"), "the database 0 alone"),
            ((b"SCAN", b"x"), "SCAN takes"),
            ((b"AUTH", b"x"), "no tokens here"),
            ((b"HELLO", b"4"), "NOPROTO"),
        ]:
            assert told in talk.refused(*words)
        assert talk.ask(b"PING") == b"PONG"
    assert host.records() == set()
    assert host.leases() == 0


def test_a_record_that_finds_no_room_is_refused_and_the_connection_goes_on(content: bytes) -> None:
    with running(nbytes=8192, segment_bytes=4096) as [small], talking(small) as talk:
        assert "OOM" in talk.refused(b"SET", name(1), content)
        assert talk.ask(b"EXISTS", name(1)) == 0


def test_tokens_say_whose_records_are_seen(tmp_path: Path, content: bytes) -> None:
    file = tokens(tmp_path, f"# tenants\n{TOKEN}\nteam {TOKEN}x\nteam {TOKEN}y\n")
    with running(token_file=file) as [host]:
        with talking(host) as talk:
            for words in [(b"GET", name(1)), (b"EXISTS", name(1)), (b"SET", name(1), content), (b"PING",)]:
                assert "NOAUTH" in talk.refused(*words)
            assert "NOAUTH" in talk.refused(b"HELLO", b"3")
            assert talk.ask(b"AUTH", TOKEN.encode()) == b"OK"
            assert talk.ask(b"SET", name(1), content) == b"OK"
        with talking(host) as talk:
            assert isinstance(talk.ask(b"HELLO", b"2", b"AUTH", b"team", TOKEN.encode() + b"y"), list)
            assert talk.ask(b"EXISTS", name(1)) == 0
            assert talk.ask(b"GET", name(1)) is None
        with talking(host) as talk:
            for user, token in [(b"team", TOKEN), (b"none", TOKEN), (b"default", TOKEN[:-1])]:
                assert "WRONGPASS" in talk.refused(b"AUTH", user, token.encode())
            assert "WRONGPASS" in talk.refused(b"AUTH", TOKEN.encode())  # too often wrong before
        assert host.records("team") == set()
        assert host.records() == {key_of(1)}
        assert host.leases() == 0


def test_who_says_no_token_in_time_is_sent_away(tmp_path: Path) -> None:
    file = tokens(tmp_path, TOKEN)
    with running(token_file=file, greeting_timeout_s=0.05) as [host], talking(host) as talk:
        assert talk.ended()
        assert host.connections() == 0


def test_a_record_before_a_token_does_not_hold_the_connection(tmp_path: Path) -> None:
    file = tokens(tmp_path, TOKEN)
    waits = {"greeting_timeout_s": 0.05, "transfer_timeout_s": 600}
    with running(token_file=file, **waits) as [host], talking(host) as talk:
        talk.socket.sendall(encode_head(b"SET", name(1), nbytes=1 << 20, after=0) + b"some of it")
        assert talk.ended()
        assert host.connections() == 0


def test_what_peers_say_makes_no_kinds_of_ends() -> None:
    with running(transfer_timeout_s=0.05) as [host]:
        for byte in range(40):  # none is the "*" of a command
            with talking(host) as talk:
                talk.socket.sendall(bytes([byte]))
                assert talk.ended()
        with talking(host) as talk:
            talk.socket.sendall(b"*1")
            assert talk.ended()
        server = host.server
        assert server is not None
        wait_until(lambda: host.connections() == 0)
        assert host.ask(server.statistics).counts.ended == {"it said no command": 40, "it was too slow": 1}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("short", "a token has at least 16 characters"),
        (f"a b {TOKEN}", "line 1: expected a tenant and a token"),
        (f"te/am {TOKEN}", "the tenant: expected a name"),
        ("# nothing\n\n", "holds no token"),
    ],
)
def test_files_of_tokens_that_are_none_stop_the_start(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"peer\.token_file") as caught:
        Tokens.read(tokens(tmp_path, text))
    assert told in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_without_tokens_it_listens_on_the_loopback_alone() -> None:
    for there in ("0.0.0.0:1", "[::]:1", "host:1", "10.0.0.1:1"):
        with pytest.raises(ValueError, match="set token_file"):
            PeerOptions.model_validate({"listen": there})
    for here in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        assert PeerOptions.model_validate({"listen": here}).listen.port == 1
    for wrong in ("host", ":1", 7, "host:x"):
        with pytest.raises(ValueError, match=r"host:port|name:port"):
            PeerOptions.model_validate({"listen": wrong})


def test_a_certificate_is_asked_for(tmp_path: Path, content: bytes) -> None:
    authority = Authority(tmp_path)
    tls = {"cert_file": authority.issue("server"), "client_ca_file": authority.file}
    with running(tls=tls) as [host]:
        context = ssl.create_default_context(cafile=authority.file)
        with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)), talking(host, context) as talk:
            talk.ask(b"PING")
        context.load_cert_chain(authority.issue("client"))
        with talking(host, context) as talk:
            assert talk.ask(b"SET", name(1), content) == b"OK"
            assert talk.ask(b"GET", name(1)) == content
        with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)), talking(host) as talk:
            talk.ask(b"PING")


def test_one_connection_too_many_is_told_and_closed() -> None:
    with running(max_connections=1) as [host], talking(host) as first:
        assert first.ask(b"PING") == b"PONG"
        with talking(host) as second:
            assert "max number of clients" in str(second.reply())
            assert second.ended()
        assert first.ask(b"PING") == b"PONG"


def test_who_makes_no_handshake_counts_and_is_ended_with_the_server(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = {"cert_file": authority.issue("server")}
    context = ssl.create_default_context(cafile=authority.file)
    with (
        running(tls=tls, max_connections=2, greeting_timeout_s=600) as [host],
        talking(host) as first,
        talking(host) as second,
    ):
        with talking(host) as third:
            assert third.ended()
        assert host.server is not None
        assert host.ask(host.server.statistics).counts.refused == 1
        first.socket.close()
        wait_until(lambda: _answers(host, context))
        host.kill()
        assert second.ended()


def _answers(host: Host, context: ssl.SSLContext) -> bool:
    try:
        with talking(host, context) as talk:
            return talk.ask(b"PING") == b"PONG"
    except (OSError, AssertionError):
        return False


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"*1\r\n$%d\r\n" % (2 * MAX_COMMAND_BYTES),
        encode_head(b"SET", name(1), nbytes=1 << 50, after=0),
        encode_head(b"SET", name(1), nbytes=4096, after=0) + bytes(4096) + b"xx",
        b"\x00" * 100,
    ],
)
def test_nonsense_ends_that_connection_alone(host: Host, data: bytes) -> None:
    with talking(host) as other, talking(host) as talk:
        assert other.ask(b"PING") == b"PONG"
        talk.socket.sendall(data)
        assert talk.ended()
        assert other.ask(b"PING") == b"PONG"
        assert host.leases() == 0


@given(
    noise=st.lists(
        st.binary(max_size=60)
        | st.sampled_from([encode(b"GET", name(1)), encode(b"EXISTS", name(1)), encode(b"SCAN", b"0")])
        | st.just(encode_head(b"SET", name(2), nbytes=9000, after=0)),
        max_size=6,
    )
)
def test_any_bytes_leave_the_others_and_the_leases_alone(
    shared: Host, content: bytes, noise: list[bytes]
) -> None:
    shared.replace(key_of(1), lambda _: content)
    with talking(shared) as talk:
        talk.socket.sendall(b"".join(noise))
        talk.socket.shutdown(1)
        assert talk.ended()
    wait_until(lambda: shared.leases() == 0)
    assert key_of(2) not in shared.records()
    assert key_of(1) in shared.records()
    with talking(shared) as talk:
        assert talk.ask(b"STRLEN", name(1)) == len(content)


def test_who_does_not_read_holds_no_lease_for_longer_than_the_deadline(content: bytes) -> None:
    with running(transfer_timeout_s=0.2) as [host]:
        host.replace(key_of(1), lambda _: content)
        with talking(host) as talk, talking(host) as other:
            talk.socket.sendall(encode(b"GET", name(1)) * 400 * 3)  # more than all buffers between us take
            assert other.ask(b"PING") == b"PONG"
            wait_until(lambda: host.connections() == 1)
            assert host.leases() == 0
            assert other.ask(b"STRLEN", name(1)) == len(content)
            assert host.ask(host.server.statistics).counts.ended == {"it was too slow": 1}


def test_who_sends_too_slowly_holds_no_reservation_for_longer_than_the_deadline(content: bytes) -> None:
    with running(transfer_timeout_s=0.1) as [host], talking(host) as talk:
        talk.socket.sendall(encode_head(b"SET", name(1), nbytes=len(content), after=0) + content[:100])
        assert talk.ended()
        assert host.leases() == 0
        assert host.records() == set()


def test_an_idle_connection_is_closed() -> None:
    with running(idle_timeout_s=0.05) as [host], talking(host) as talk:
        assert talk.ended()
        assert host.connections() == 0


def test_killed_in_the_middle_of_a_record_it_keeps_no_part_of_it(content: bytes) -> None:
    with running() as [host]:
        with talking(host) as talk:
            talk.socket.sendall(encode_head(b"SET", name(1), nbytes=len(content), after=0) + content[:5000])
            wait_until(lambda: host.leases() == 1)
            host.kill()
            assert talk.ended()
        host.start()
        assert host.leases() == 0
        assert host.records() == set()
        with talking(host) as talk:
            assert isinstance(talk.ask(b"NONE"), ErrorReply)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("turns_before", range(6))
def test_a_connection_accepted_while_it_closes_is_ended(
    turns_before: int, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def close_soon_after_a_connection() -> bytes:
        pool = Pool(memoryview(bytearray(1 << 20)), segment_bytes=1 << 20)
        options = PeerOptions.model_validate({"listen": "127.0.0.1:0"})
        async with PeerServer(pool, options, max_record_bytes=1 << 20) as server:
            client = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
            await turns(turns_before)
        with client, contextlib.suppress(ConnectionResetError):
            return await asyncio.to_thread(client.recv, 1)
        return b""

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(close_soon_after_a_connection()) == b""
