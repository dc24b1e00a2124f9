"""The host tier while the daemon is stopped, stuck, full or restarted; and leases that outlive the tier."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from lmcache_async.daemon import server
from lmcache_async.daemon.messages import HELLO_BYTES, PROTOCOL, Grant, Op, Refusal, Welcome, pack_welcome
from lmcache_async.daemon.server import shared_memory
from lmcache_async.daemon.session import Session
from lmcache_async.errors import (
    BudgetExceededError,
    TierClosedError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer, pages
from lmcache_async.plugins.host import HostConfig, HostTier, copying
from lmcache_async.plugins.host.connection import MAX_UNANSWERED, Connection, Reconnector
from lmcache_async.testing.records import FORMAT, check_record, key_of, record
from lmcache_async.tiers.results import memory_was_short
from lmcache_async.types import ChunkKey
from tests.support.daemons import DEADLINE_S, MIB, ThreadedDaemon, host_tier, socket_path
from tests.support.gates import Gate

RECORD_BYTES = FORMAT.record_bytes(5000)


@pytest.fixture
def daemon():
    with socket_path() as path, ThreadedDaemon(path, max_bytes="2MiB") as daemon:
        yield daemon
        assert daemon.leases("t") == (0, 0)


@pytest_asyncio.fixture
async def tier(daemon, arena):
    async with opened(daemon, arena) as tier:
        yield tier


def opened(daemon: ThreadedDaemon, arena: Arena, **options: object) -> HostTier:
    tier = host_tier(daemon.path, **{"tenant": "t", **options})
    tier.bind(arena)
    return tier


async def put(tier: HostTier, arena: Arena, *numbers: int) -> None:
    for number in numbers:
        with record(arena, number) as buffer:
            await tier.put(key_of(number), buffer)


def churn(daemon: ThreadedDaemon) -> None:
    """Overwrite all memory of the pool that is not leased."""

    def write() -> None:
        for number in range(3000):
            slot = daemon.pool.reserve("churn", key_of(number), RECORD_BYTES)
            if slot is not None:
                slot.view[:] = b"\xee" * RECORD_BYTES
                daemon.pool.commit(slot)

    daemon.call(write)


class Frozen:
    """Stops the daemon for the duration of the block."""

    def __init__(self, daemon: ThreadedDaemon) -> None:
        self._daemon = daemon
        self._stopped, self._go_on = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        def stop() -> None:
            self._stopped.set()
            assert self._go_on.wait(DEADLINE_S)

        self._daemon.loop.call_soon(stop)
        assert self._stopped.wait(DEADLINE_S)

    def __exit__(self, *_: object) -> None:
        self._go_on.set()


async def test_an_array_that_outlives_its_lease_keeps_the_record(daemon, tier, arena, allocate):
    await put(tier, arena, 1)
    got = await tier.get(key_of(1), allocate)
    assert got is not None
    array = got.array[100:200]
    content = bytes(array)
    got.release()
    await tier.contains(key_of(1))  # the tier has sent its pending messages
    assert await tier.remove(key_of(1))
    churn(daemon)
    assert bytes(array) == content
    assert daemon.leases("t") == (1, 0)
    del array
    await daemon.until_leases((0, 0), "t")


async def test_a_lease_outlives_the_tier(daemon, arena, allocate):
    async with opened(daemon, arena) as tier:
        await put(tier, arena, 1)
        got = await tier.get(key_of(1), allocate)
        assert got is not None
        assert await tier.remove(key_of(1))
    churn(daemon)
    check_record(got, 1)
    assert daemon.leases("t") == (1, 0)
    await asyncio.to_thread(got.release)  # the last release may happen in any thread
    await daemon.until_leases((0, 0), "t")


async def test_a_lease_outlives_its_daemon_and_is_unknown_to_the_next_one(arena, allocate):
    with socket_path() as path:
        with ThreadedDaemon(path, max_bytes="2MiB") as first:
            tier = opened(first, arena)
            await tier.__aenter__()
            await put(tier, arena, 1)
            old = await tier.get(key_of(1), allocate)
            assert old is not None
        assert tier._opened is not None
        while tier._opened.figures is not None:  # the closed connection is noticed soon
            await asyncio.sleep(0)
        with pytest.raises(TierUnavailableError):
            await tier.contains(key_of(1))
        assert tier.statistics().chunks == 0
        with ThreadedDaemon(path, max_bytes="2MiB") as second:
            await reconnected(tier._opened)
            assert await tier.get(key_of(1), allocate) is None
            await put(tier, arena, 1)
            new = await tier.get(key_of(1), allocate)
            assert new is not None
            check_record(old, 1)
            old.release()
            await tier.contains(key_of(1))
            assert second.leases("t") == (1, 0), "a lease of another daemon's was given back here"
            check_record(new, 1)
            new.release()
            await second.until_leases((0, 0), "t")
            await tier.__aexit__(None, None, None)


@pytest.fixture
def few_items(monkeypatch):
    """Limit messages to four keys."""
    monkeypatch.setattr("lmcache_async.daemon.messages.MAX_ITEMS", 4)
    monkeypatch.setattr("lmcache_async.plugins.host.tier.MAX_ITEMS", 4)


async def reconnected(link: Reconnector) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while link.figures is None:
            await asyncio.sleep(0)


async def lose(link: Reconnector, connection: Connection) -> None:
    """Close the connection, and wait for the next one."""
    connection.abort(TierUnavailableError("lost"))
    await reconnected(link)


async def listed(tier: HostTier) -> list[ChunkKey]:
    return [key async for key in tier.keys()]  # noqa: SIM118 - no dict


@pytest.mark.usefixtures("few_items")
async def test_a_list_of_keys_interrupted_by_a_lost_connection_is_an_error(tier, arena, monkeypatch):
    await put(tier, arena, *range(9))
    link, ask = tier._opened, Connection.ask
    assert link is not None

    async def answered(connection: Connection, op: Op, *question: Any, **options: Any) -> bytes:
        answer = await ask(connection, op, *question, **options)
        if op is Op.KEYS:
            await lose(link, connection)
        return answer

    assert sorted(await listed(tier)) == [key_of(number) for number in range(9)]
    monkeypatch.setattr(Connection, "ask", answered)
    with pytest.raises(TierUnavailableError):
        await listed(tier)


async def test_reconnecting_continues_after_an_unexpected_error(tier, arena, monkeypatch):
    await put(tier, arena, 1)
    link = tier._opened
    assert link is not None
    connect, errors = Reconnector.connect, [RuntimeError("can't start new thread")]

    async def fail_once(link: Reconnector) -> Connection:
        if errors:
            raise errors.pop()
        return await connect(link)

    monkeypatch.setattr(Reconnector, "connect", fail_once)
    await lose(link, link.connection)

    assert await tier.contains(key_of(1))
    assert errors == []


@pytest.mark.usefixtures("few_items")
async def test_lists_of_keys_are_requested_one_after_the_other(tier, arena, monkeypatch):
    await put(tier, arena, *range(9))
    ask, starts = Connection.ask, []

    async def asked(connection: Connection, op: Any, body: bytes) -> bytes:
        starts.append(int.from_bytes(body, "little"))
        return await ask(connection, op, body)

    monkeypatch.setattr(Connection, "ask", asked)
    one, other = await asyncio.gather(listed(tier), listed(tier))
    assert one == other
    assert starts == [0, 4, 8, 0, 4, 8]


async def test_without_a_daemon_the_tier_opens_and_every_call_raises(arena, allocate):
    with socket_path() as path, record(arena, 1) as buffer:
        tier = host_tier(path)
        async with tier:
            for call in (
                tier.contains(key_of(1)),
                tier.get(key_of(1), allocate),
                tier.put(key_of(1), buffer),
                tier.remove(key_of(1)),
                tier.clear(),
            ):
                with pytest.raises(TierUnavailableError):
                    await call
        with pytest.raises(TierClosedError):
            await tier.contains(key_of(1))


@contextlib.contextmanager
def answering(welcome: Welcome) -> Iterator[Path]:
    """A program that answers each greeting with `welcome` and 1 MiB of memory, and closes the connection."""
    with (
        socket_path() as path,
        socket.socket(socket.AF_UNIX) as listener,
        shared_memory(MIB, huge_pages=False, prefault=False) as (memory, _),
    ):
        listener.bind(os.fspath(path))
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):  # the listener is shut down
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
                        socket.send_fds(connection, [pack_welcome(welcome)], [memory])

        thread = threading.Thread(target=answer)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("welcome", "reason"),
    [
        (
            Welcome(PROTOCOL + 1, Refusal.PROTOCOL, 0, 0),
            f"protocol version is {PROTOCOL + 1}, expected {PROTOCOL}",
        ),
        (Welcome(PROTOCOL, Refusal.TOO_MUCH, 0, 0), "limit of clients"),
        (Welcome(PROTOCOL, Refusal.NONE, 0, MIB), "says that its memory has 0 bytes, the file has 1048576"),
        (Welcome(PROTOCOL, Refusal.NONE, 1 << 63, MIB), "9223372036854775808 bytes"),
    ],
)
async def test_calls_name_the_reason_why_the_daemon_cannot_be_used(welcome, reason):
    with answering(welcome) as path:
        async with host_tier(path) as tier:
            with pytest.raises(TierUnavailableError, match=f"{path}: cannot connect: .*{reason}"):
                await tier.contains(key_of(1))


async def test_a_daemon_that_does_not_accept_connections_is_not_reported_as_another_user():
    with contextlib.ExitStack() as open_sockets:
        path = open_sockets.enter_context(socket_path())
        listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(path))
        listener.listen(0)
        waiting = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(os.fspath(path))  # the queue is full now

        async with host_tier(path) as tier:
            with pytest.raises(
                TierUnavailableError, match=r"cannot connect: .*queue of new connections is full"
            ):
                await tier.contains(key_of(1))


async def test_the_error_of_a_user_that_the_daemon_does_not_allow_names_allow_uids(daemon, monkeypatch):
    monkeypatch.setattr(server, "peer_of", lambda _: (1, os.geteuid() + 1))
    async with host_tier(daemon.path) as tier:
        with pytest.raises(TierUnavailableError, match=rf"its log.*allow_uids.* user {os.geteuid()}"):
            await tier.contains(key_of(1))


async def test_calls_name_the_reason_why_the_tier_does_not_reconnect(arena):
    with socket_path() as path, ThreadedDaemon(path) as daemon:
        async with opened(daemon, arena) as tier:
            daemon.stop()
            reason = ""
            async with asyncio.timeout(DEADLINE_S):
                while "cannot connect: [Errno 2]" not in reason:
                    await asyncio.sleep(0)
                    try:
                        await tier.contains(key_of(1))
                    except TierUnavailableError as error:
                        reason = str(error)


async def test_calls_of_a_daemon_that_hangs_end_at_their_deadline_without_leases(daemon, arena, allocate):
    async with opened(daemon, arena, lookup_timeout_s=0.01, transfer_timeout_s=0.01) as tier:
        with record(arena, 1) as buffer:
            async with asyncio.timeout(DEADLINE_S):
                while True:  # the machine may be too busy for that deadline
                    try:
                        await tier.put(key_of(1), buffer)
                        break
                    except TierUnavailableError:
                        continue
            with Frozen(daemon):
                for call in (
                    tier.contains(key_of(1)),
                    tier.get(key_of(1), allocate),
                    tier.put(key_of(2), buffer),
                ):
                    with pytest.raises(TierUnavailableError, match="no answer"):
                        await call
        await daemon.until_leases((0, 0), "t")  # leases of late answers are released


async def test_connecting_waits_for_the_first_answer_until_the_deadline_of_connects(daemon, monkeypatch):
    monkeypatch.setattr(Session, "data_received", lambda session, data: None)  # does not answer
    config = HostConfig(
        socket=daemon.path, connect_timeout_s=0.05, lookup_timeout_s=0.001, transfer_timeout_s=0.001
    )
    with pytest.raises(TierUnavailableError, match=r"within connect_timeout_s of 0\.05 s"):
        await Reconnector(config, pin=False, pin_device=None).connect()


async def test_no_request_is_sent_to_a_daemon_with_too_many_unanswered_ones(daemon, tier, arena):
    with Frozen(daemon):
        calls = [asyncio.ensure_future(tier.contains(key_of(1))) for _ in range(MAX_UNANSWERED + 10)]
        done, running = await asyncio.wait(calls, timeout=0.0)
        while len(done) < 10:
            done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        assert all(isinstance(call.exception(), TierUnavailableError) for call in done)
        assert len(running) == MAX_UNANSWERED
    assert await asyncio.gather(*running) == [False] * MAX_UNANSWERED


async def test_a_put_raises_tier_full_error_until_the_pool_has_room(daemon, tier, arena):
    hold: list[object] = []

    def fill() -> None:
        while (slot := daemon.pool.reserve("hog", key_of(len(hold)), 64 << 10)) is not None:
            hold.append(slot)

    daemon.call(fill)
    with pytest.raises(TierFullError, match="pool is full"):
        await put(tier, arena, 1)
    daemon.call(lambda: [daemon.pool.release(slot) for slot in hold])  # type: ignore[arg-type]
    await put(tier, arena, 1)
    assert await tier.contains(key_of(1))


async def test_an_engine_at_its_limit_of_leases_gets_no_further_lease(daemon, arena, allocate):
    async with opened(daemon, arena, max_lease_bytes=2 * pages(RECORD_BYTES)) as tier:
        await put(tier, arena, 1, 2, 3)
        got = await tier.get_many([key_of(number) for number in (1, 2, 3)], allocate)
        kinds = sorted(type(one).__name__ for one in got)
        assert kinds == ["Buffer", "Buffer", "TierError"]
        refused = [one for one in got if isinstance(one, TierError)]
        assert all(map(memory_was_short, refused)), "the breaker counts it as a failure of the daemon"
        with pytest.raises(BudgetExceededError, match="limit of leased bytes"):
            await tier.get(key_of(1), allocate)
        with pytest.raises(TierFullError, match="limit of leased bytes"):
            await put(tier, arena, 4)
        for one in got:
            if isinstance(one, Buffer):
                one.release()
        await put(tier, arena, 4)


def flags_of(address: int) -> list[str]:
    """Flags of the mapping at this address, as reported by the kernel."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            low, high = (int(part, 16) for part in head.split("-"))
            here = low <= address < high
        elif here and head == "VmFlags:":
            return line.split()
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("how", ["cancelled", "closed", "thrown out"])
async def test_a_reservation_lasts_until_its_copy_has_really_ended(daemon, arena, monkeypatch, how):
    gate = Gate(monkeypatch, copying, "copy_bytes", shut=True)
    tier = opened(daemon, arena)
    await tier.__aenter__()
    connection = tier._opened.connection  # type: ignore[union-attr]
    buffer = record(arena, 1)
    call = asyncio.ensure_future(tier.put(key_of(1), buffer))
    await gate.reached()
    closing: asyncio.Future[None] | None = None
    if how == "cancelled":
        call.cancel()
    elif how == "closed":
        closing = asyncio.ensure_future(tier.__aexit__(None, None, None))
    else:
        connection._transport.write(b"\xff" * 40)  # type: ignore[union-attr]
        await connection.wait_closed()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.done()
    assert closing is None or not closing.done()
    churn(daemon)
    assert daemon.leases("t") == (0, 1), "the memory is another's while our thread writes to it"
    gate.open()
    await asyncio.wait([call])
    assert call.cancelled() or isinstance(call.exception(), TierError)
    buffer.release()
    await daemon.until_leases((0, 0), "t")
    if closing is None:
        await tier.__aexit__(None, None, None)
    else:
        await closing
    assert daemon.call(lambda: daemon.pool.contains("t", [key_of(1)])) == [False]


@pytest.mark.parametrize("verb", ["get", "put"])
async def test_leases_of_a_connection_that_ends_behind_the_answer_are_not_used(
    daemon, arena, allocate, monkeypatch, verb
):
    async with opened(daemon, arena) as tier:
        await put(tier, arena, 1)
        ask = Connection.ask

        async def ask_and_lose(connection: Connection, *args: Any, **options: Any) -> bytes:
            answer = await ask(connection, *args, **options)
            connection.abort(TierUnavailableError("lost by the test"))
            await connection.wait_closed()
            return answer

        monkeypatch.setattr(Connection, "ask", ask_and_lose)
        with pytest.raises(TierUnavailableError, match="lost by the test"):
            await (put(tier, arena, 2) if verb == "put" else tier.get(key_of(1), allocate))
        monkeypatch.undo()
        await daemon.until_leases((0, 0), "t")


async def test_existing_records_are_not_copied_again(daemon, tier, arena, monkeypatch):
    await put(tier, arena, 1)
    gate = Gate(monkeypatch, copying, "copy_bytes", shut=True)
    await put(tier, arena, 1)
    assert gate.threads == set()


async def test_a_large_record_is_copied_by_several_threads_to_the_byte():
    source = np.random.default_rng(1).integers(0, 256, 9_000_001, dtype=np.uint8)
    target = np.zeros_like(source)
    copier = copying.Copier(3)
    pairs = [(target[:100], source[:100]), (target[100:100], source[100:100]), (target[100:], source[100:])]
    assert len(copying.shares(pairs, 3_000_001)) == 3
    await copier.copy(pairs)
    copier.close()
    assert np.array_equal(source, target)
    assert pairs == []


async def test_a_put_is_unavailable_if_no_thread_can_be_started_to_copy_the_record(
    daemon, tier, arena, monkeypatch
):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(TierUnavailableError, match="can't start new thread"):
            await put(tier, arena, 1)
    await daemon.until_leases((0, 0), "t")
    await put(tier, arena, 1)
    assert await tier.contains(key_of(1))


async def test_the_memory_is_not_inherited_by_children_or_programs(tier, arena):
    """A forked child does not see the mapping, and a program run by it does not inherit the descriptor."""
    await put(tier, arena, 1)
    address = tier._opened.connection.mapping._region.address  # type: ignore[union-attr]
    assert "dc" in await asyncio.to_thread(flags_of, address)  # do not copy on fork
    socket_copy = tier._opened.connection.mapping._socket_copy  # type: ignore[union-attr]
    assert not socket_copy.get_inheritable()


class SlowCUDA:
    """CUDA whose registration of the pool blocks until the test ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.in_time = True
        self.registered: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append(address)
        self.begun.set()
        self.in_time = self.go_on.wait(DEADLINE_S)  # the loop must not block here
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


async def test_the_end_of_a_daemon_while_its_pool_is_pinned_does_not_block_the_loop(arena, monkeypatch):
    cuda = SlowCUDA(monkeypatch)
    with socket_path() as path, ThreadedDaemon(path, max_bytes="2MiB") as daemon:
        tier = opened(daemon, arena)
        tier._pin, tier._pin_device = True, 0
        async with tier:
            assert await asyncio.to_thread(cuda.begun.wait, DEADLINE_S)
            connection = tier._opened.connection  # type: ignore[union-attr]
            await asyncio.to_thread(daemon.stop)
            await connection.wait_closed()
            assert not connection.usable
            with pytest.raises(ValueError, match="closed"):
                connection.mapping.lend(Grant(1, 0, 4096))
            assert cuda.registered
            cuda.go_on.set()

        assert cuda.in_time
        assert cuda.registered == [], "the tier was closed before its memory"
        assert not [thread.name for thread in threading.enumerate() if "host-unmap" in thread.name]
