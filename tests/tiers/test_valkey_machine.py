"""The valkey tier compared with a dict, with restarts of the tier and damage, on a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import uvloop

from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.thorough import machine_settings
from tests.support.valkey_servers import Server
from tests.tiers.valkey_tools import config


class ValkeyMachine(TierMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)
    late_effects = True
    server: ClassVar[Server]

    def make_tier(self, directory: Path, max_bytes: int | None) -> ValkeyTier:
        del max_bytes
        return ValkeyTier(config(self.server.url, key_prefix=f"{directory.name}:", connections=2))

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        name = self.tier.config.key_prefix + key.hex()
        content = self.server.ask("GET", name)
        assert isinstance(content, bytes)
        self.server.ask("SET", name, edit(content))
        return True


class TestValkeyMachine(ValkeyMachine.TestCase):
    settings = machine_settings(25)

    @classmethod
    def setUpClass(cls) -> None:
        ValkeyMachine.server = Server()
        ValkeyMachine.server.start()

    @classmethod
    def tearDownClass(cls) -> None:
        ValkeyMachine.server.stop()
