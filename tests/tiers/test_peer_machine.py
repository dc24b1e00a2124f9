"""The peer tier against a dict, over restarts of the tier and damage, with two real hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import uvloop

from lmcache_async.plugins.peer import PeerTier
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.thorough import machine_settings
from tests.tiers.peer_hosts import Host, config


class PeerMachine(TierMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)
    late_effects = True
    hosts: ClassVar[list[Host]]

    def make_tier(self, directory: Path, max_bytes: int | None) -> PeerTier:
        """A new directory means that nothing is there yet."""
        del max_bytes
        if not (mark := directory / "used").exists():
            mark.touch()
            for host in self.hosts:
                host.empty()
        return PeerTier(config(*self.hosts, connections=2))

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        [host] = [host for host in self.hosts if key in host.records()]
        host.replace(key, edit)
        return True


class TestPeerMachine(PeerMachine.TestCase):
    settings = machine_settings(25)

    @classmethod
    def setUpClass(cls) -> None:
        PeerMachine.hosts = [Host(), Host()]
        for host in cls.hosts():
            host.start()

    @classmethod
    def tearDownClass(cls) -> None:
        for host in cls.hosts():
            assert host.leases() == 0
            host.kill()

    @staticmethod
    def hosts() -> list[Host]:
        return PeerMachine.hosts
