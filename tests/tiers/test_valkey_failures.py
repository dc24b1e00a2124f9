"""The valkey tier while servers are killed, restarted, stopped and replaced: misses, drops, and met deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from dataclasses import replace

import pytest

from lmcache_async.config.values import Endpoint
from lmcache_async.errors import (
    BudgetExceededError,
    TierClosedError,
    TierError,
    TierPartUnavailableError,
    TierUnavailableError,
)
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.plugins.valkey.config import ValkeyConfig
from lmcache_async.plugins.valkey.connection import Connection, ConnectionSettings, Node
from lmcache_async.plugins.valkey.protocol import ErrorReply, Reply, encode
from lmcache_async.plugins.valkey.topology import Cluster, Topology, parse_slots, slot_of
from lmcache_async.testing.records import key_of, record
from lmcache_async.testing.steps import cancelled_at_each_await, turns
from lmcache_async.tiers import client
from lmcache_async.types import ChunkKey
from tests.support.outcomes import get, put, until_hit
from tests.support.processes import free_port, hanging, wait_until
from tests.support.traffic import Traffic
from tests.support.valkey_servers import Server, master_of, running, running_cluster
from tests.tiers.valkey_tools import bound, config, of_each

SHORT = {"connect_timeout_s": 0.3, "lookup_timeout_s": 0.3, "transfer_timeout_s": 0.3}
SLACK_S = 20.0
"""Time that a call may take beyond its deadline on a busy machine."""


@pytest.fixture
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def cluster():
    with running_cluster() as cluster:
        yield cluster


async def test_a_restart_of_the_server_causes_only_misses_and_drops(server, arena, allocate):
    async with bound(config(server.tcp_url), arena) as tier:
        traffic = Traffic(tier.put_many, tier.get_many, arena, allocate)
        async with traffic.running():
            for _ in range(3):
                await traffic.seen_again("hit")
                server.kill()
                await traffic.seen_again("drop", "TierUnavailableError")
                server.start()
                await traffic.seen_again("hit")
    assert traffic.seen <= {"hit", "miss", "drop", "TierUnavailableError"}
    assert traffic.slowest_s < 20 + SLACK_S


VERBS = {
    "get": lambda tier, buffer, allocate: tier.get(key_of(1), allocate),
    "put": lambda tier, buffer, allocate: tier.put(key_of(1), buffer),
    "contains": lambda tier, buffer, allocate: tier.contains(key_of(1)),
    "count_prefix": lambda tier, buffer, allocate: tier.count_prefix([key_of(1)]),
    "remove": lambda tier, buffer, allocate: tier.remove(key_of(1)),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_call_to_a_hanging_server_fails_at_the_deadline(server, arena, allocate, verb):
    async with bound(config(server.url, **SHORT), arena) as tier:
        await until_hit(tier, arena, allocate)  # in time at last, also on a busy machine
        with (
            record(arena, 1) as buffer,
            hanging(server.signal),
            pytest.raises(TierUnavailableError, match=str(server.socket)),
        ):
            await VERBS[verb](tier, buffer, allocate)
        await until_hit(tier, arena, allocate, 2)  # the abandoned command may still remove the other one


async def test_a_large_record_to_a_server_that_hangs_gives_its_memory_back(server):
    arena = Arena(48 << 20, 16 << 20, huge_pages=False, prefault=False)
    buffer = arena.lease_nowait(16 << 20)
    assert buffer is not None
    async with bound(config(server.url, **SHORT), arena) as tier:
        await until_hit(tier, arena, lambda nbytes: arena.lease(nbytes, timeout_s=5))
        server.signal(signal.SIGSTOP)  # its socket buffers a part of it
        with pytest.raises(TierUnavailableError, match="no reply to the write of 16777216 bytes"):
            await tier.put(key_of(1), buffer)
        buffer.release()
        server.signal(signal.SIGCONT)
    assert arena.statistics().leased_slabs == 0
    arena.close()


async def test_a_tier_opens_without_its_server_and_finds_it_later(server, arena, allocate, caplog):
    server.kill()
    async with bound(config(server.tcp_url), arena) as tier:
        with pytest.raises(TierUnavailableError, match=f"127.0.0.1:{server.port}: cannot connect: .*url"):
            await tier.contains(key_of(1))
        server.start()
        assert await put(tier, arena, 1) == [None]
        assert await get(tier, allocate, 1) == ["hit"]
    assert "misses every chunk until its server can be reached" in caplog.text


@pytest.mark.one_loop
def test_the_tests_know_the_master_of_each_slot(cluster):
    slots = (0, 5460, 5461, 10921, 10922, 16383)
    table = parse_slots(cluster.servers[0].ask("CLUSTER", "SLOTS"), Endpoint("127.0.0.1", 1))
    ports = [server.port for server in cluster.servers]

    assert [ports[master_of(slot)] for slot in slots] == [table[slot].port for slot in slots]


@pytest.mark.one_loop
async def test_a_cluster_continues_without_one_of_its_nodes(cluster, arena, allocate):
    settings = config(cluster.url, mode="cluster", node_pause_s=0.01)
    homes = of_each(settings, 3)
    lost, first, second = homes
    async with bound(settings, arena) as tier:
        assert await put(tier, arena, *lost, *first, *second) == [None] * 9
        cluster.servers[0].kill()
        try:
            assert await get(tier, allocate, *first, *second) == ["hit"] * 6
            assert await get(tier, allocate, *lost) == ["TierPartUnavailableError"] * 3
            assert await get(tier, allocate, first[0], lost[0], second[0]) == [
                "hit",
                "TierPartUnavailableError",
                "hit",
            ]
            keys = [key_of(number) for number in (first[0], second[0], lost[0], first[1])]
            assert await tier.count_prefix(keys) == 2
            assert await tier.contains_many(keys) == [True, True, False, True]
            answers = await put(tier, arena, lost[0], first[0])
            assert [type(answer) for answer in answers] == [TierPartUnavailableError, type(None)]
            found: list[ChunkKey] = []
            with pytest.raises(TierUnavailableError):
                await _list(tier, found)
            assert set(found) == {key_of(number) for number in (*first, *second)}
        finally:
            cluster.servers[0].start()
            cluster.wait_whole()
        await until_hit(tier, arena, allocate, lost[0])


@pytest.mark.one_loop
async def test_a_cluster_whose_nodes_are_all_down_is_unavailable_until_they_return(cluster, arena, allocate):
    settings = config(cluster.url, mode="cluster", node_pause_s=0.01)
    numbers = [number for [number] in of_each(settings, 1)]
    async with bound(settings, arena) as tier:
        assert await put(tier, arena, *numbers) == [None] * 3
        for server in cluster.servers:
            server.kill()
        try:
            while (results := await get(tier, allocate, *numbers)) != ["TierUnavailableError"] * 3:
                # The first node that failed, although the others seemed healthy.
                assert set(results) <= {"TierUnavailableError", "TierPartUnavailableError"}
        finally:
            cluster.start_again()
        for number in numbers:
            await until_hit(tier, arena, allocate, number)


async def _list(tier: ValkeyTier, found: list[ChunkKey]) -> None:
    async for key in tier.keys():
        found.append(key)


@pytest.mark.one_loop
async def test_a_node_that_hangs_delays_the_others_once(cluster, arena, allocate):
    # A healthy node answers within this deadline, also on a busy machine; otherwise it would be avoided too.
    settings = config(cluster.url, mode="cluster", lookup_timeout_s=3, transfer_timeout_s=3, node_pause_s=600)
    (stuck,), (first,), (second,) = of_each(settings, 1)
    async with bound(settings, arena) as tier:
        assert await put(tier, arena, stuck, first, second) == [None] * 3
        with hanging(cluster.servers[0].signal):
            keys = [key_of(first), key_of(second), key_of(stuck)]
            assert await tier.count_prefix(keys) == 2
            start = time.monotonic()
            for _ in range(100):
                assert await tier.count_prefix(keys) == 2
                assert await get(tier, allocate, first, stuck) == ["hit", "TierPartUnavailableError"]
            assert time.monotonic() - start < 10 * SLACK_S  # at most one deadline, not 200
        cluster.wait_whole()


@pytest.mark.one_loop
async def test_a_slot_that_moves_is_followed(cluster, arena, allocate):
    settings = config(cluster.url, mode="cluster")
    [[number, other], _, _] = of_each(settings, 2)
    source, target = cluster.servers[:2]
    name = f"{settings.key_prefix}{key_of(number).hex()}"
    slot = source.ask("CLUSTER", "KEYSLOT", name)
    ids = [server.ask("CLUSTER", "MYID").decode() for server in (source, target)]
    async with bound(settings, arena) as tier:
        await put(tier, arena, number, other)
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        source.ask("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
        # During the migration the source redirects with ASK.
        assert await get(tier, allocate, number, other) == ["hit", "hit"]
        assert await tier.contains_many([key_of(number), key_of(other)]) == [True, True]
        assert await put(tier, arena, number) == [None]
        for server in (target, source):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        # After the migration.
        assert await get(tier, allocate, number, other) == ["hit", "hit"]
        assert await tier.contains(key_of(number))
        assert await tier.remove(key_of(number))
        for server in (source, target):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[0])


async def test_slots_that_get_a_node_later_are_found(arena, allocate):
    with running("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        async with bound(config(node.tcp_url, mode="cluster"), arena) as tier:
            with pytest.raises(TierUnavailableError, match="no node of the cluster serves the slot"):
                await tier.contains(key_of(1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until_hit(tier, arena, allocate)


async def test_the_slot_table_of_a_removed_node_is_not_used(arena, allocate):
    """It answers with a table without slots."""
    options = ("--cluster-enabled", "yes", "--cluster-port")
    with running(*options, str(free_port())) as removed, running(*options, str(free_port())) as node:
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"))
        async with bound(config(f"{removed.tcp_url},127.0.0.1:{node.port}", mode="cluster"), arena) as tier:
            assert await put(tier, arena, 1) == [None]
            assert await get(tier, allocate, 1) == ["hit"]


async def test_a_cluster_without_any_node_is_an_error_in_time(arena, allocate):
    settings = config(f"valkey://127.0.0.1:{free_port()}", mode="cluster", **SHORT)
    async with bound(settings, arena) as tier:
        with pytest.raises(TierUnavailableError, match="no node of the cluster returns its table of slots"):
            await tier.contains(key_of(1))
        assert await get(tier, allocate, 1, 2) == ["TierUnavailableError"] * 2
        assert all(isinstance(answer, TierError) for answer in await put(tier, arena, 1, 2))


@pytest.mark.one_loop
async def test_a_new_master_is_found_by_sentinel(server, arena, allocate):
    quick = ("--repl-diskless-sync-delay", "0")
    watched = (
        f"sentinel monitor kv 127.0.0.1 {server.port} 1\n"
        "sentinel down-after-milliseconds kv 60000\nsentinel failover-timeout kv 2000\n"
    )
    with (
        running("--replicaof", f"127.0.0.1 {server.port}", *quick) as replica,
        running("--sentinel", config=watched) as sentinel,
    ):
        wait_until(lambda: b"slave0" in sentinel.ask("INFO", "replication") or _knows_replica(sentinel))
        url = f"valkey-sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"
        async with bound(config(url, sentinel_service="kv"), arena) as tier:
            assert await put(tier, arena, 1, 2) == [None, None]
            assert server.ask("DBSIZE") == 2
            wait_until(lambda: replica.ask("DBSIZE") == 2)
            sentinel.ask("SENTINEL", "SET", "kv", "down-after-milliseconds", 300)
            server.kill()
            await until_hit(tier, arena, allocate, 3)
            assert await get(tier, allocate, 1, 2) == ["hit"] * 2
            assert replica.ask("ROLE")[0] == b"master"


def _knows_replica(sentinel: Server) -> bool:
    replicas = sentinel.ask("SENTINEL", "REPLICAS", "kv")
    return isinstance(replicas, list) and len(replicas) == 1


async def test_a_timeout_of_the_network_is_not_reported_as_that_of_an_option(arena, monkeypatch):
    async def connect(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(Node, "_open", connect)
    async with bound(config("valkey://127.0.0.1:1"), arena) as tier:
        with pytest.raises(TierUnavailableError, match="cannot connect: Connection timed out"):
            await tier.contains(key_of(1))


async def test_a_read_that_waits_for_memory_does_not_delay_a_write(server, arena):
    asked, memory = asyncio.Event(), asyncio.Event()

    async def allocate(nbytes: int) -> Buffer:
        asked.set()
        await memory.wait()
        return await arena.lease(nbytes, timeout_s=5)

    async with bound(config(server.url, connections=1), arena) as tier:
        reading = asyncio.ensure_future(tier.get(key_of(1), allocate))
        await asked.wait()
        results = await put(tier, arena, 2)
        memory.set()

        assert await reading is None
        assert results == [None]


async def test_the_rest_of_a_batch_is_sent_to_the_new_master(server, arena, allocate, monkeypatch):
    class FailingOver(Topology):
        failed = False

        async def _find(self) -> Node:
            return self.node(self._endpoints[self.failed])

        def note_failure(self) -> None:
            self.failed = True

    async with bound(settings := config(server.tcp_url, connections=1), arena) as tier:
        assert await put(tier, arena, 1, 2, 3) == [None] * 3
    both = settings.address
    dead = Endpoint("127.0.0.1", free_port())
    monkeypatch.setattr(ValkeyConfig, "address", replace(both, endpoints=(dead, *both.endpoints)))
    tier = bound(settings, arena)
    topology = FailingOver(tier._settings)
    tier._open(topology)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(tier.__aexit__)
        assert await get(tier, allocate, 1, 2, 3) == ["TierUnavailableError", "hit", "hit"]
        assert topology.failed
        topology.failed = False
        puts = await put(tier, arena, 1, 2, 3)
        assert isinstance(puts[0], TierUnavailableError)
        assert puts[1:] == [None, None]


async def test_a_master_unknown_to_the_sentinels_is_reported(server):
    with running("--sentinel", config=f"sentinel monitor kv 127.0.0.1 {server.port} 1\n") as sentinel:
        settings = config(f"valkey-sentinel://127.0.0.1:{sentinel.port}", sentinel_service="other")
        async with ValkeyTier(settings) as tier:
            with pytest.raises(TierUnavailableError, match="has no master 'other': check sentinel_service"):
                await tier.contains(key_of(1))


@pytest.mark.one_loop
async def test_hanging_sentinels_delay_many_callers_no_longer_than_one(server, arena, allocate):
    watched = f"sentinel monitor kv 127.0.0.1 {server.port} 1\n"
    with running("--sentinel", config=watched) as stuck, running("--sentinel", config=watched) as sentinel:
        stuck.signal(signal.SIGSTOP)
        url = f"valkey-sentinel://127.0.0.1:{stuck.port},127.0.0.1:{sentinel.port}"
        async with bound(config(url, sentinel_service="kv", **SHORT), arena) as tier:
            await until_hit(tier, arena, allocate)
        sentinel.signal(signal.SIGSTOP)
        async with bound(config(url, sentinel_service="kv", **SHORT), arena) as tier:
            start = time.monotonic()
            calls = [tier.contains(key_of(number)) for number in range(100)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {TierUnavailableError}
            assert time.monotonic() - start < 0.6 + SLACK_S


async def test_closing_ends_a_call_that_is_connecting():
    with socket.socket() as deaf:  # accepts connections and sends nothing
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"valkey://127.0.0.1:{deaf.getsockname()[1]}"
        tier = ValkeyTier(config(url, connect_timeout_s=600, lookup_timeout_s=0.1))
        await tier.__aenter__()
        call = asyncio.ensure_future(tier.get(key_of(1), allocate_nothing))
        await turns(20)
        await tier.__aexit__(None, None, None)
        with pytest.raises(TierClosedError):
            await call


async def allocate_nothing(nbytes: int) -> Buffer:
    raise BudgetExceededError(f"no {nbytes} bytes for this test")


async def test_a_redirect_that_arrives_when_the_tier_is_closed_raises_the_error_itself(server):
    class Moved(Node):
        async def call(self, message: bytes, count: int) -> list[Reply]:
            self._on_failure()
            return [ErrorReply("MOVED", "MOVED 1 127.0.0.1:1")] * count

    settings = config(server.tcp_url, mode="cluster")
    topology = Cluster(ConnectionSettings(settings, (), None))
    first, second = (
        Moved(Endpoint("127.0.0.1", port), topology._settings, topology.close) for port in (1, 2)
    )
    topology._nodes = {node.endpoint: node for node in (first, second)}
    topology._table, topology._stale = [first.endpoint] * 8192 + [second.endpoint] * 8192, False
    names = [
        next(name for name in map(b"%d".__mod__, range(99)) if slot_of(name) // 8192 == half)
        for half in (0, 1)
    ]

    with pytest.raises(TierClosedError):
        await topology.ask_each(b"EXISTS", names)


async def test_a_server_that_hangs_is_noticed_although_each_lookup_is_cancelled_before_its_deadline(server):
    settings = config(server.tcp_url, lookup_timeout_s=1)
    node = Node(settings.address.endpoints[0], ConnectionSettings(settings, (), None), lambda: None)
    await node.call(encode(b"PING"), 1)
    with hanging(server.signal):
        while not node.failed:
            call = asyncio.ensure_future(node.call(encode(b"PING"), 1))
            await turns(3)
            call.cancel()
            await asyncio.wait({call})
    assert await node.call(encode(b"PING"), 1) == [b"PONG"]
    node.close(TierClosedError("closed"))
    await node.wait_closed()


async def test_a_connection_whose_opening_is_cancelled_is_not_waited_for_at_the_end(server, monkeypatch):
    monkeypatch.setattr(client, "CLOSE_S", 3600.0)
    settings = config(server.url)
    async for _ in cancelled_at_each_await(lambda _: open_and_close(settings)):
        pass


async def test_a_connection_that_is_aborted_while_it_is_opened_is_gone_when_its_socket_is_closed(server):
    connection = Connection("server", 1.0, copies=False)
    host, _, port = server.tcp_url.rpartition("/")[2].partition(":")
    opening = asyncio.ensure_future(
        asyncio.get_running_loop().create_connection(lambda: connection, host, int(port))
    )
    await turns(1)
    connection.abort()

    assert not connection.gone.is_set()
    await opening
    await connection.gone.wait()


async def test_a_wait_for_a_closed_connection_that_is_cancelled_at_its_end_raises_the_cancellation():
    for number in range(6):  # iterations of the loop between the end and the cancellation
        connection = Connection("server", 1.0, copies=False)
        waiting = asyncio.ensure_future(connection.wait_closed())
        await turns(2)
        connection.discard()
        await turns(number)
        cancelled = waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() is cancelled


async def open_and_close(settings: ValkeyConfig) -> None:
    node = Node(settings.address.endpoints[0], ConnectionSettings(settings, (), None), lambda: None)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(reserved(node))
    finally:
        node.close(TierClosedError("closed"))
        await node.wait_closed()


async def reserved(node: Node) -> None:
    async with node.connection():
        pass


async def test_a_connection_that_is_closed_while_it_is_opened_fails_with_the_reason(server):
    settings = config(server.tcp_url)
    for number in range(5):  # iterations of the loop before the end; the connection is made in one of them
        node = Node(settings.address.endpoints[0], ConnectionSettings(settings, (), None), lambda: None)
        opening = asyncio.ensure_future(reserved(node))
        await turns(number)
        node.close(TierClosedError("closed"))
        [error] = await asyncio.gather(opening, return_exceptions=True)
        assert error is None or isinstance(error, TierClosedError)
        assert not node.failed
        await node.wait_closed()


async def test_a_record_waits_for_a_free_connection_until_the_deadline(server):
    settings = config(server.tcp_url, connections=1, transfer_timeout_s=0.05)
    node = Node(settings.address.endpoints[0], ConnectionSettings(settings, (), None), lambda: None)
    async with node.connection():
        with pytest.raises(TierUnavailableError, match="no free connection within transfer_timeout_s"):
            await reserved(node)
        assert not node.failed
    async with node.connection() as connection:
        assert connection.idle
    node.close(TierClosedError("closed"))
    await node.wait_closed()
