"""Sessions: an invalid or unresponsive client ends only its own session, and its leases are released."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_async.daemon import messages, server
from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.daemon.messages import (
    PROTOCOL,
    WELCOME_BYTES,
    FrameParser,
    Grant,
    Hello,
    Op,
    Refusal,
    Welcome,
    frame,
    pack_hello,
)
from lmcache_async.daemon.server import Daemon
from lmcache_async.errors import ConfigError
from lmcache_async.memory.buffer import PAGE
from lmcache_async.testing.records import key_of, record, small_arena
from lmcache_async.testing.steps import turns
from tests.support.daemons import DEADLINE_S, ThreadedDaemon, socket_path


class Client:
    """A socket that speaks the protocol as far as a test needs."""

    def __init__(
        self, path: Path, tenant: str = "t", *, greet: bool = True, protocol: int = PROTOCOL
    ) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(os.fspath(path))
        self.frames = FrameParser()
        self.fds: list[int] = []
        if greet:
            self.socket.sendall(pack_hello(Hello(protocol, tenant, 0)))
            message, self.fds, _, _ = socket.recv_fds(self.socket, WELCOME_BYTES, 4)
            self.welcome: Welcome = messages.unpack_welcome(message)

    def ask(self, op: Op, *parts: bytes) -> bytes:
        self.socket.sendall(frame(op, *parts))
        answered, answer = self.answer()
        assert answered is op
        return answer

    def answer(self) -> tuple[Op, bytes]:
        while (message := self.frames.take()) is None:
            data = self.socket.recv(1 << 16)
            assert data, "the daemon ended the connection"
            self.frames.feed(data)
        return message[0], messages.unpack_figures(message[1])[1]

    def reserve(self, number: int, nbytes: int) -> Grant:
        answer = self.ask(Op.RESERVE, messages.RESERVATION.pack(key_of(number), nbytes))
        return messages.unpack_grants(answer, 1, self.welcome.nbytes)[0]

    def store(self, number: int) -> None:
        """Store a whole record through the file descriptor."""
        arena = small_arena(1)
        with record(arena, number) as sealed:
            grant = self.reserve(number, sealed.nbytes)
            os.pwrite(self.fds[0], sealed.view, grant.offset)
        arena.close()
        flags = self.ask(Op.COMMIT, messages.COMMIT.pack(grant.lease, key_of(number)))
        assert flags == bytes([Refusal.NONE])

    def ends(self) -> bool:
        """Whether the daemon has stopped answering."""
        return self.socket.recv(1) == b""

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture(scope="module")
def daemon() -> Iterator[ThreadedDaemon]:
    with socket_path() as path, ThreadedDaemon(path, max_bytes="8MiB") as daemon:
        yield daemon


@contextlib.contextmanager
def client(daemon: ThreadedDaemon, tenant: str = "t", **options: object) -> Iterator[Client]:
    made = Client(daemon.path, tenant, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


async def test_a_list_of_keys_is_dropped_at_its_end(daemon: ThreadedDaemon) -> None:
    with client(daemon, uuid.uuid4().hex) as one:
        one.store(1)
        assert one.ask(Op.KEYS, messages.NUMBER.pack(0)) == key_of(1)
        one.socket.sendall(frame(Op.KEYS, messages.NUMBER.pack(1)))
        assert one.ends()


NONSENSE = {
    "a frame that is too long": (messages.MAX_BODY_BYTES + 1).to_bytes(4, "little") + bytes([Op.CONTAINS]),
    "no such message": frame(Op.CONTAINS)[:4] + b"\xff",
    "half a key": frame(Op.CONTAINS, b"123"),
    "a lease that does not exist": frame(Op.RELEASE, messages.NUMBER.pack(77)),
    "a lease of another's": frame(Op.RELEASE, messages.NUMBER.pack(1)),
    "a commit of nothing": frame(Op.COMMIT, messages.COMMIT.pack(9, key_of(1))),
    "a record without a byte": frame(Op.RESERVE, messages.RESERVATION.pack(key_of(1), 0)),
    "two numbers for one": frame(Op.KEYS, messages.pack(messages.NUMBER, [[0], [1]])),
    "the rest of a list that was not begun": frame(Op.KEYS, messages.NUMBER.pack(4)),
    "more than it asks": frame(Op.CLEAR, b"everything"),
}


@pytest.mark.parametrize("sent", NONSENSE)
async def test_an_invalid_message_ends_only_its_own_connection(daemon: ThreadedDaemon, sent: str) -> None:
    with client(daemon, "other") as other:
        held = other.reserve(1, 100)
        with client(daemon, "bad") as bad:
            bad.socket.sendall(NONSENSE[sent])
            assert bad.ends()
        assert other.ask(Op.CONTAINS, key_of(5)) == b"\x00"
        other.socket.sendall(frame(Op.RELEASE, messages.NUMBER.pack(held.lease)))
        await daemon.until_leases((0, 0), "other")


async def test_leases_last_until_the_client_closes_after_an_invalid_message(daemon: ThreadedDaemon) -> None:
    """The client may still write to the leased memory."""
    with client(daemon, "writes") as one:
        assert one.reserve(1, 10_000).lease
        one.socket.sendall(b"\xff" * 40)
        assert one.ends()
        one.socket.sendall(frame(Op.RELEASE, messages.NUMBER.pack(1)))  # no longer read
        with client(daemon, "writes") as other:
            assert other.ask(Op.CONTAINS, key_of(1)) == b"\x00"
        assert daemon.leases("writes") == (0, 1)
    await daemon.until_leases((0, 0), "writes")


@settings(max_examples=60)
@given(data=st.binary(max_size=200))
def test_no_bytes_affect_other_clients(daemon: ThreadedDaemon, data: bytes) -> None:
    with client(daemon, "fuzz") as other:
        before = other.reserve(1, 5000)
        with client(daemon, "fuzzed") as bad:
            bad.socket.sendall(data)
        with client(daemon, "greeted badly", greet=False) as bad:
            bad.socket.sendall(data)
        assert other.ask(Op.CONTAINS, key_of(1)) == b"\x00"
        assert before.lease
        assert other.ask(Op.REMOVE, key_of(1)) == b"\x00"


@settings(max_examples=60)
@given(op=st.sampled_from(Op), body=st.binary(max_size=120))
def test_any_body_of_any_message_is_answered_or_ends_the_connection(
    daemon: ThreadedDaemon, op: Op, body: bytes
) -> None:
    with client(daemon, "bodies") as one, client(daemon, "others") as other:
        one.socket.sendall(frame(op, body) + frame(Op.CONTAINS))
        with contextlib.suppress(AssertionError):  # the session was ended
            while one.answer()[0] is not Op.CONTAINS:
                pass
        assert other.ask(Op.CONTAINS, key_of(1)) == b"\x00"


def test_another_protocol_is_refused_with_a_reason(daemon: ThreadedDaemon) -> None:
    with client(daemon, protocol=99) as one:
        assert (one.welcome.refusal, one.welcome.protocol, one.fds) == (Refusal.PROTOCOL, PROTOCOL, [])
        assert one.ends()


def test_clients_above_the_limit_are_refused() -> None:
    with (
        socket_path() as path,
        ThreadedDaemon(path, max_bytes="1MiB", max_clients=1) as daemon,
        client(daemon) as first,
        client(daemon) as second,
    ):
        assert (first.welcome.refusal, second.welcome.refusal) == (Refusal.NONE, Refusal.TOO_MUCH)
        assert second.ends()
        assert first.ask(Op.CONTAINS, key_of(1)) == b"\x00"


def test_a_connection_without_a_greeting_times_out() -> None:
    with (
        socket_path() as path,
        ThreadedDaemon(path, max_bytes="1MiB", greeting_timeout_s=0.01) as daemon,
        client(daemon, greet=False) as silent,
    ):
        assert silent.ends()


@pytest.mark.parametrize("steps", range(6))
async def test_a_daemon_that_ends_while_a_client_connects_closes_the_connection(steps: int) -> None:
    with socket_path() as path:
        async with Daemon(DaemonConfig(socket=path, max_bytes=1 << 20)):
            await turns(1)
            connecting = Client(path, greet=False)
            await turns(steps)

        with contextlib.suppress(ConnectionResetError):  # not accepted yet
            assert connecting.ends()
        connecting.close()


def test_another_user_is_refused(daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "peer_of", lambda connection: (1, os.geteuid() + 1))
    with client(daemon, greet=False) as stranger:
        assert stranger.ends()


def test_an_allowed_user_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(server, "peer_of", lambda connection: (os.getpid(), other))
    with socket_path() as path, ThreadedDaemon(path, max_bytes="1MiB", allow_uids=[other]) as daemon:
        assert path.stat().st_mode & 0o777 == 0o666
        with client(daemon) as one:
            assert one.ask(Op.CONTAINS, key_of(1)) == b"\x00"


async def test_no_messages_are_read_from_a_client_that_does_not_read(daemon: ThreadedDaemon) -> None:
    with client(daemon, "slow") as slow, client(daemon, "quick") as quick:
        slow.socket.setblocking(False)
        question = frame(Op.LEASE, *[key_of(number) for number in range(4000)])
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += slow.socket.send(question)
                assert sent < 64 << 20, "the daemon reads on and keeps every answer"
        assert quick.ask(Op.CONTAINS, key_of(1)) == b"\x00"


def test_short_reservations_count_in_whole_pages(daemon: ThreadedDaemon) -> None:
    with client(daemon) as one:
        most = one.welcome.max_lease_bytes // PAGE
        answer = one.ask(
            Op.RESERVE, *(messages.RESERVATION.pack(key_of(number), 1) for number in range(most + 1))
        )
        grants = messages.unpack_grants(answer, most + 1, one.welcome.nbytes)
        assert all(grant.lease for grant in grants[:most])
        assert grants[most] == Grant.refused(Refusal.TOO_MUCH)


def test_bytes_that_are_not_a_record_are_not_committed(daemon: ThreadedDaemon) -> None:
    with client(daemon, "zeros") as one:
        grant = one.reserve(1, 10_000)
        flags = one.ask(Op.COMMIT, messages.COMMIT.pack(grant.lease, key_of(1)))
        assert flags == bytes([Refusal.MISSING])
        assert one.ask(Op.CONTAINS, key_of(1)) == b"\x00"


def test_the_memory_cannot_be_truncated(daemon: ThreadedDaemon) -> None:
    with client(daemon) as one, pytest.raises(PermissionError):
        os.ftruncate(one.fds[0], 4096)


def test_a_second_daemon_at_the_same_socket_does_not_start(daemon: ThreadedDaemon) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"another daemon listens at .* already; stop it, or name another socket"
        ),
        ThreadedDaemon(daemon.path, max_bytes="1MiB"),
    ):
        pass
    with client(daemon) as one:
        assert one.ask(Op.CONTAINS, key_of(1)) == b"\x00"


def test_a_file_at_the_sockets_path_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("max_bytes: 1GiB\n")
    with (
        pytest.raises(
            ConfigError,
            match=r"^socket: .*kv\.yaml exists and is not a socket: name another path .*, or move that file$",
        ),
        ThreadedDaemon(file, max_bytes="1MiB"),
    ):
        pass
    assert file.read_text() == "max_bytes: 1GiB\n"


def test_a_file_that_replaced_the_socket_is_not_removed() -> None:
    with socket_path() as path:
        with ThreadedDaemon(path, max_bytes="1MiB"):
            path.unlink()
            path.write_text("theirs")
        assert path.read_text() == "theirs"


def test_a_reservation_is_committed_under_its_own_key_only(daemon: ThreadedDaemon) -> None:
    with client(daemon, "keys") as one:
        grant = one.reserve(1, 10_000)
        one.socket.sendall(frame(Op.COMMIT, messages.COMMIT.pack(grant.lease, key_of(2))))
        assert one.ends()
    with client(daemon, "keys") as another:
        assert another.ask(Op.CONTAINS, key_of(1) + key_of(2)) == b"\x00\x00"
