"""The host tier against the contract of tiers, with a real daemon."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from lmcache_async.plugins.host import HostTier
from lmcache_async.testing.conformance import SuffixEvictionConformance, TierConformance
from lmcache_async.types import ChunkKey
from tests.support.daemons import ThreadedDaemon, host_tier, socket_path


@pytest.fixture(scope="module")
def daemon():
    with socket_path() as path, ThreadedDaemon(path, max_bytes="128MiB") as daemon:
        yield daemon


class HostConformance(TierConformance, SuffixEvictionConformance):
    many_keys = 2000

    @pytest.fixture(autouse=True)
    def _daemons(self, daemon):
        """Start daemons for a case; at the end none of them has a leased record."""
        self._started: list[ThreadedDaemon] = [daemon]
        yield
        for each in self._started:
            held = each.call(each.pool.statistics).tenants.values()
            leases = [(tenant.readers, tenant.writers) for tenant in held]
            assert set(leases) <= {(0, 0)}, "closed, and leases of the daemon's memory are not back"
        for own in self._started[1:]:
            own.stop()

    async def damage(self, tier: HostTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return self._started[-1].edit(tier.config.tenant, key, edit)

    def limit(self, tier: HostTier, max_bytes: int) -> HostTier:
        path = tier.config.socket
        own = ThreadedDaemon(path.with_name(uuid.uuid4().hex), max_bytes=max(max_bytes, 1 << 20))
        own.config = own.config.model_copy(update={"max_bytes": max_bytes, "max_client_bytes": max_bytes})
        own.__enter__()
        self._started.append(own)
        return HostTier(tier.config.model_copy(update={"socket": own.path}))


class TestHostTier(HostConformance):
    @pytest.fixture
    def tier(self, daemon):
        return host_tier(daemon.path)
