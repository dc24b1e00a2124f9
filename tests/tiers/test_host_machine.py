"""The host tier compared with a dict: restarts of the tier, damage, limits, and other clients of the same pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from lmcache_async.plugins.host import HostTier
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.daemons import ThreadedDaemon, host_tier
from tests.support.thorough import machine_settings


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
