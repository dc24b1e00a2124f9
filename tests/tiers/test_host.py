"""The host tier with a real daemon: the contract, and a comparison with a dict with other clients of the same pool."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from lmcache_async.plugins.host import HostTier
from lmcache_async.testing.conformance import SuffixEvictionConformance, TierConformance
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.daemons import ThreadedDaemon, host_tier, socket_path
from tests.support.thorough import machine_settings


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


class HostMachine(TierMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)

    def make_tier(self, directory: Path, max_bytes: int | None) -> HostTier:
        """The daemon outlives restarts of the tier; a pool always has a limit."""
        if not hasattr(self, "daemon"):
            wanted = max_bytes or 8 << 20
            self.daemon = ThreadedDaemon(directory / "s")
            # A call may lease a record more than once.
            limits = {"max_bytes": wanted, "max_client_bytes": 16 * wanted}
            self.daemon.config = self.daemon.config.model_copy(update=limits)
            self.daemon.__enter__()
        return host_tier(self.daemon.path, tenant="t")

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return self.daemon.edit("t", key, edit)

    @rule(nbytes=st.integers(1, 100_000))
    def another_tenants_record(self, nbytes: int) -> None:
        """Another tenant's record may evict records of this one, which is counted; it is never visible here."""

        def put() -> None:
            slot = self.daemon.pool.reserve("other", ChunkKey(b"k" * 16), nbytes)
            if slot is not None:
                slot.view[:] = b"\xaa" * nbytes
                self.daemon.pool.commit(slot)

        self.daemon.call(put)
        self.run(self.tier.contains(ChunkKey(bytes(16))))  # removals are known once an answer arrives

    @invariant()
    def all_memory_is_back(self) -> None:
        if hasattr(self, "tier"):
            self.run(self.daemon.until_leases((0, 0), "t"))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "daemon"):
            self.daemon.stop()


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = machine_settings(60)
