"""Metrics of the daemon's pool."""

from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.daemon.metrics import SERIES, daemon_families
from lmcache_async.daemon.pool import Pool
from lmcache_async.observability.families import exposition
from lmcache_async.testing.records import key_of


def values(pool):
    text = exposition(daemon_families(pool.statistics())).decode()
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


def test_every_series_of_the_daemon_is_a_series_of_its_own():
    names = [family.name for family in SERIES]

    assert len(set(names)) == len(names)
    assert all(family.name.endswith("_total") == (family.kind == "counter") for family in SERIES)
