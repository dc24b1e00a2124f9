"""The engine with a host tier and its default layers. Shared memory is read and never written."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_async.engine.status import EngineSource
from lmcache_async.testing.rig import Rig
from tests.daemon.client_child import TOKENS
from tests.support.daemons import ThreadedDaemon, socket_path


@pytest.fixture
def daemon() -> Iterator[ThreadedDaemon]:
    with socket_path() as path, ThreadedDaemon(path, max_bytes="2MiB") as daemon:
        yield daemon
        assert daemon.leases() == (0, 0)


def host(daemon: ThreadedDaemon) -> dict[str, object]:
    return {"name": "host", "socket": str(daemon.path), "prefault": False, "connect_timeout_s": 10}


async def store(rig: Rig, **config: object) -> int:
    rig.write(range(len(TOKENS)), rig.content(TOKENS))
    async with rig.open(**config) as engine:
        report = await engine.store(TOKENS, torch.arange(len(TOKENS)))
        assert await engine.flush(timeout_s=30)
    return report.stored


async def hits(rig: Rig, times: int = 1, **config: object) -> int:
    """Retrieve several times, compare the content, and return the number of hit tokens of the last time."""
    async with rig.open(**config) as engine:
        for _ in range(times):
            rig.wipe()
            mask = await engine.retrieve(TOKENS, torch.arange(64, 64 + len(TOKENS)))
            hit = int(mask.sum())
            assert torch.equal(rig.read(range(64, 64 + hit)), rig.content(TOKENS)[:, :, :hit])
    return hit


async def test_encrypted_records_are_decrypted_elsewhere(daemon: ThreadedDaemon, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(secrets.token_bytes(32).hex())
    keys.chmod(0o600)
    config = {"tiers": [host(daemon)], "encryption.key_file": str(keys)}
    assert await store(Rig(slabs=32), **config) == 5

    assert await hits(Rig(slabs=32), times=3, **config) == len(TOKENS)  # an overwrite would fail the second


async def test_a_cpu_tier_before_the_pool_gets_copies(daemon: ThreadedDaemon) -> None:
    assert await store(Rig(slabs=32), tiers=[host(daemon)]) == 5
    assert await hits(Rig(slabs=32), times=2, tiers=["cpu", host(daemon)]) == len(TOKENS)


async def test_a_damaged_record_is_a_miss_for_all_from_then_on(daemon: ThreadedDaemon) -> None:
    config = {"tiers": [host(daemon)]}
    assert await store(Rig(slabs=32), **config) == 5
    keys = daemon.call(lambda: daemon.pool.keys("default"))
    for key in keys:
        daemon.edit("default", key, lambda content: content[:-1] + bytes([content[-1] ^ 1]))

    assert await hits(Rig(slabs=32), **config) == 0
    assert len(daemon.call(lambda: daemon.pool.keys("default"))) < len(keys)


async def test_an_engine_without_its_daemon_runs_on_misses(tmp_path: Path) -> None:
    config = {"tiers": [{"name": "host", "socket": str(tmp_path / "none"), "connect_timeout_s": 0.1}]}
    assert await store(Rig(slabs=32), **config) == 0
    assert await hits(Rig(slabs=32), **config) == 0


async def test_each_rank_reports_the_pool_and_none_counts_it(daemon: ThreadedDaemon) -> None:
    rig = Rig()
    rig.write(range(len(TOKENS)), rig.content(TOKENS))
    async with rig.open(tiers=["cpu", host(daemon)]) as engine:
        await engine.store(TOKENS, torch.arange(len(TOKENS)))
        assert await engine.flush(timeout_s=30)
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
