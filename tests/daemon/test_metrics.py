"""What a daemon holds and what peers do, as metrics."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.daemon.metrics import SERIES, daemon_families
from lmcache_async.daemon.peer_options import PeerOptions
from lmcache_async.daemon.peers import PeerServer
from lmcache_async.daemon.pool import Pool
from lmcache_async.observability.families import exposition
from lmcache_async.testing.records import key_of


def values(pool, peers=None):
    text = exposition(daemon_families(pool.statistics(), peers)).decode()
    return {
        (sample.name.removeprefix("lmcache_async_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def put(pool, tenant, number):
    slot = pool.reserve(tenant, 4096, key=key_of(number))
    pool.commit(tenant, key_of(number), slot)


def test_a_pool_is_told_by_tenant():
    pool = Pool(memoryview(bytearray(64 << 10)), segment_bytes=16 << 10)
    for number in range(20):
        put(pool, "team", number)
    pool.lease("team", key_of(19))
    pool.reserve("other", 100)

    told = values(pool)

    assert told["pool_max_bytes",] == 64 << 10
    assert told["pool_tenant_chunks", "team"] == told["pool_tenant_record_bytes", "team"] / 4096
    assert told["pool_tenant_evictions_total", "team"] == 20 + 1 - 16
    assert told["pool_tenant_readers", "team"] == told["pool_tenant_writers", "other"] == 1
    assert told["pool_tenant_bytes", "other"] == 4096
    assert not any(name.startswith("peer_") for name, *_ in told)


async def test_a_peer_server_is_told_by_what_its_peers_did():
    pool = Pool(memoryview(bytearray(64 << 10)))
    put(pool, "default", 1)
    options = PeerOptions.model_validate({"listen": "127.0.0.1:0"})
    async with PeerServer(pool, options, max_record_bytes=1 << 20) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            for number in (1, 2):
                writer.write(f"*2\r\n$3\r\nGET\r\n$32\r\n{key_of(number).hex()}\r\n".encode())
            await reader.readuntil(b"$-1\r\n")
            told = values(pool, server.statistics())
        finally:
            writer.close()
            await writer.wait_closed()

    assert told["peer_sent_records_total",] == 1
    assert told["peer_sent_bytes_total",] == 4096
    assert told["peer_misses_total",] == 1
    assert told["peer_connections",] == 1
    assert told["peer_max_connections",] >= 1


def test_every_series_of_the_daemon_is_a_series_of_its_own():
    names = [family.name for family in SERIES]

    assert len(set(names)) == len(names)
    assert all(family.name.endswith("_total") == (family.kind == "counter") for family in SERIES)
