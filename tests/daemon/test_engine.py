"""The engine with a host tier and its default layers. Shared memory is read and never written."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_async.engine.status import EngineSource
from lmcache_async.testing.rig import Rig
from tests.daemon.client_child import TOKENS
from tests.support.daemons import ThreadedDaemon, socket_path
from tests.support.engines import retrieve, store
from tests.support.secret_files import secret_file


@pytest.fixture
def daemon() -> Iterator[ThreadedDaemon]:
    with socket_path() as path, ThreadedDaemon(path, max_bytes="2MiB") as daemon:
        yield daemon
        assert daemon.leases() == (0, 0)


def host(daemon: ThreadedDaemon) -> dict[str, object]:
    return {"name": "host", "socket": str(daemon.path), "prefault": False, "connect_timeout_s": 10}


async def stored(**config: object) -> int:
    """Store the prompt with a new engine, and return the number of stored chunks."""
    rig = Rig(slabs=32)
    async with rig.open(**config) as engine:
        return (await store(rig, engine, TOKENS)).stored


async def hits(times: int = 1, **config: object) -> int:
    """Retrieve several times with a new engine. Return the number of hit tokens of the last time."""
    rig = Rig(slabs=32)
    async with rig.open(**config) as engine:
        for _ in range(times):
            hit = sum(await retrieve(rig, engine, TOKENS))
    return hit


async def test_encrypted_records_are_decrypted_elsewhere(daemon: ThreadedDaemon, tmp_path: Path) -> None:
    keys = secret_file(tmp_path, secrets.token_bytes(32).hex())
    config = {"tiers": [host(daemon)], "encryption.key_file": str(keys)}
    assert await stored(**config) == 5

    assert await hits(times=3, **config) == len(TOKENS)  # an overwrite would fail the second


async def test_a_cpu_tier_before_the_pool_gets_copies(daemon: ThreadedDaemon) -> None:
    assert await stored(tiers=[host(daemon)]) == 5
    assert await hits(times=2, tiers=["cpu", host(daemon)]) == len(TOKENS)


async def test_each_rank_reports_the_pool_and_none_counts_it(daemon: ThreadedDaemon) -> None:
    rig = Rig()
    async with rig.open(tiers=["cpu", host(daemon)]) as engine:
        await store(rig, engine, TOKENS)
        samples = list(engine.metrics.read())
        page = EngineSource(engine.config, engine.namespace, engine.metrics, engine.statistics).status()
    tiers: dict[str, set[tuple[str, ...]]] = {}
    for series, labels, _ in samples:
        tiers.setdefault(series.name, set()).add(labels)
    for name in ("tier_chunks", "tier_bytes", "tier_max_bytes", "tier_evictions_total"):
        assert tiers[name] == {("cpu",)}, "ranks are added up, and the pool is one"
    assert ("host",) in tiers["tier_stored_chunks_total"]
    assert ("host",) in tiers["tier_hit_chunks_total"]
    [shown] = [tier for tier in page["tiers"] if tier["id"] == "host"]
    assert (shown["max_bytes"], shown["chunks"] > 0) == (2 << 20, True)
