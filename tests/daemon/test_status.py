"""The status endpoint and the metrics of the daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.daemon.pool import Pool
from lmcache_async.daemon.status import MAX_TENANTS, DaemonSource, pool_samples
from lmcache_async.errors import ConfigError
from lmcache_async.metrics.samples import exposition
from lmcache_async.testing.records import key_of
from tests.support.daemons import ThreadedDaemon, socket_path
from tests.support.http_client import ask

ON = {"listen": "127.0.0.1:0"}


@pytest.fixture
def daemon() -> Iterator[ThreadedDaemon]:
    tenants = {"chat": {"max_bytes": "8MiB"}}
    with socket_path() as path, ThreadedDaemon(path, http=ON, tenants=tenants) as daemon:
        yield daemon


def put(daemon: ThreadedDaemon, tenant: str, nbytes: int) -> None:
    def run() -> None:
        block = daemon.pool.reserve(tenant, key_of(1), nbytes)
        assert block is not None
        daemon.pool.commit(block)

    daemon.call(run)


async def test_the_status_has_the_tenants(daemon: ThreadedDaemon) -> None:
    put(daemon, "chat", 4096)
    put(daemon, "batch", 8192)
    url = daemon.daemon.status_url
    assert url is not None
    status = (await ask(url, "/status.json")).json()
    metrics = (await ask(url, "/metrics")).body.decode()

    assert (status["kind"], status["pool"]["bytes"], status["pool"]["max_bytes"]) == (
        "daemon",
        12288,
        64 << 20,
    )
    batch, chat = status["tenants"]
    assert (batch["id"], batch["bytes"], batch["chunks"]) == ("batch", 8192, 1)
    assert (chat["id"], chat["max_bytes"]) == ("chat", 8 << 20)
    assert 'lmcache_async_pool_tenant_bytes{tenant="chat"} 4096' in metrics


def test_samples_contain_only_the_largest_tenants(daemon: ThreadedDaemon) -> None:
    for number in range(MAX_TENANTS + 5):
        put(daemon, f"t{number}", 4096 * (number + 1))
    source = DaemonSource(daemon.daemon.pool, daemon.daemon.path, lambda: daemon.daemon.clients)
    samples = [daemon.call(source.sample) for _ in range(2)]
    chart, leases = daemon.call(lambda: source.charts(samples))

    assert [series.name for series in chart.series] == [f"t{n}" for n in range(MAX_TENANTS + 4, 4, -1)]
    assert list(chart.series[0].values) == [4096 * (MAX_TENANTS + 5)]
    assert [series.name for series in leases.series] == ["readers", "writers"]


def test_a_used_port_stops_the_start(daemon: ThreadedDaemon) -> None:
    port = str(daemon.daemon.status_url).rstrip("/").rpartition(":")[2]
    with (
        socket_path() as path,
        pytest.raises(
            ConfigError,
            match=f"http.listen: cannot listen at 127.0.0.1:{port}: .*; name another address or port",
        ),
        ThreadedDaemon(path, http={"listen": f"127.0.0.1:{port}"}),
    ):
        pass


def values(pool: Pool) -> dict[tuple[str, ...], float]:
    text = exposition(pool_samples(pool.statistics()).families()).decode()
    return {
        (sample.name.removeprefix("lmcache_async_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_pool_is_exported_by_tenant() -> None:
    pool = Pool(memoryview(bytearray(64 << 10)))
    for number in range(20):
        pool.commit(pool.reserve("team", key_of(number), 4096))
    pool.lease("team", key_of(19))
    pool.reserve("other", key_of(0), 100)

    found = values(pool)

    assert found["pool_max_bytes",] == 64 << 10
    assert found["pool_tenant_chunks", "team"] == found["pool_tenant_record_bytes", "team"] / 4096
    assert found["pool_tenant_evictions_total", "team"] == 20 + 1 - 16
    assert found["pool_tenant_readers", "team"] == found["pool_tenant_writers", "other"] == 1
    assert found["pool_tenant_bytes", "other"] == 4096
