"""Metrics of the daemon's pool."""

from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.status import pool_samples
from lmcache_async.metrics.samples import exposition
from lmcache_async.testing.records import key_of


def values(pool):
    text = exposition(pool_samples(pool.statistics()).families()).decode()
    return {
        (sample.name.removeprefix("lmcache_async_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def put(pool, tenant, number):
    slot = pool.reserve(tenant, key_of(number), 4096)
    pool.commit(slot)


def test_the_pool_is_exported_by_tenant():
    pool = Pool(memoryview(bytearray(64 << 10)))
    for number in range(20):
        put(pool, "team", number)
    pool.lease("team", key_of(19))
    pool.reserve("other", key_of(0), 100)

    told = values(pool)

    assert told["pool_max_bytes",] == 64 << 10
    assert told["pool_tenant_chunks", "team"] == told["pool_tenant_record_bytes", "team"] / 4096
    assert told["pool_tenant_evictions_total", "team"] == 20 + 1 - 16
    assert told["pool_tenant_readers", "team"] == told["pool_tenant_writers", "other"] == 1
    assert told["pool_tenant_bytes", "other"] == 4096
