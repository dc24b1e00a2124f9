"""Reports of stores about tiers that other processes read."""

from __future__ import annotations

import pytest

from lmcache_async.errors import TierUnavailableError
from lmcache_async.plugins.disk import DiskTier
from lmcache_async.plugins.host import HostTier
from lmcache_async.plugins.mooncake import MooncakeTier
from lmcache_async.plugins.s3 import S3Tier
from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.testing.fakes import DictTier, FakeRegistry
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import Capabilities

TOKENS = list(range(24))  # three chunks


class SharedTier(DictTier):
    @property
    def capabilities(self):
        return Capabilities(removes=True, lists=True, local_index=True, shared=True)


class RefusingTier(SharedTier):
    """A tier that accepts one chunk only."""

    async def put(self, key, buffer):
        if self.records:
            raise TierUnavailableError("no more")
        await super().put(key, buffer)


@pytest.mark.parametrize(
    ("tiers", "shared"),
    [
        ({}, 0),
        ({"own": DictTier}, 0),
        ({"shared": SharedTier}, 3),
        ({"shared": RefusingTier}, 1),
        ({"shared": RefusingTier, "other": SharedTier}, 3),
        ({"own": DictTier, "shared": RefusingTier}, 1),
    ],
    ids=lambda value: "+".join(kind.__name__ for kind in value.values()) if isinstance(value, dict) else None,
)
async def test_a_store_counts_what_others_can_read(tiers, shared):
    rig = Rig()
    settings = {"tiers": ["cpu", *tiers], "store.batch_bytes": rig.slab_bytes}
    async with rig.open(registry=FakeRegistry(tiers=tiers), **settings) as engine:
        reports = []
        store_chunks = engine.store_chunks

        async def store(request):
            reports.append(await store_chunks(request))
            return reports[-1]

        engine.store_chunks = store
        await engine.store(TOKENS, TOKENS)

    [report] = reports
    assert (report.stored, report.shared) == (3, shared)  # memory has all of them


@pytest.mark.parametrize(
    ("tier", "shared"),
    [(DiskTier, False), (HostTier, False), (ValkeyTier, True), (S3Tier, True), (MooncakeTier, True)],
)
def test_shared_tiers_are_recognised(tier, shared, tmp_path):
    options = {
        DiskTier: {"path": tmp_path, "max_bytes": 1 << 20},
        HostTier: {"socket": tmp_path / "socket"},
        MooncakeTier: {"url": "mooncake://localhost:50051"},
        ValkeyTier: {"url": "valkey://localhost"},
        S3Tier: {"url": "s3://bucket"},
    }[tier]

    assert tier(tier.config_type(**options)).capabilities.shared is shared
