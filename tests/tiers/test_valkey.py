"""The valkey tier: the contract over a Unix socket, TCP, TLS and a cluster, and a comparison with a dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import uvloop

from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.plugins.valkey.topology import slot_of
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.certificates import Authority
from tests.support.proxy import Proxy
from tests.support.thorough import machine_settings
from tests.support.valkey_servers import Server, running, running_cluster
from tests.tiers.valkey_tools import config


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def cluster():
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


def edit_value(server: Server, name: str, edit: Callable[[bytes], bytes]) -> bool:
    content = server.ask("GET", name)
    assert isinstance(content, bytes)
    server.ask("SET", name, edit(content))
    return True


class ValkeyConformance(TierConformance):
    many_keys = 500

    async def damage(self, tier: ValkeyTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        name = tier.config.key_prefix + key.hex()
        return edit_value(self.server_of(name), name, edit)

    def server_of(self, name: str) -> Server:
        del name
        return self._server


class TestOverAUnixSocket(ValkeyConformance):
    many_keys = 2000

    @pytest.fixture
    def tier(self, server):
        self._server = server
        return ValkeyTier(config(server.url))


@pytest.mark.one_loop
class TestOverTCPWithOneConnection(ValkeyConformance):
    @pytest.fixture
    def tier(self, server):
        self._server = server
        return ValkeyTier(config(f"{server.tcp_url}/3", connections=1))

    async def damage(self, tier: ValkeyTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        del tier, key, edit
        return False  # the database is not the one of the test tools


class TestOverTLS(ValkeyConformance):
    @pytest.fixture
    async def tier(self, server, authority):
        self._server = server
        async with Proxy(server.port, tls=authority.server_context()) as proxy:
            yield ValkeyTier(config(f"valkeys://127.0.0.1:{proxy.port}", tls_ca_file=authority.file))


@pytest.mark.one_loop
class TestInACluster(ValkeyConformance):
    @pytest.fixture
    def tier(self, cluster):
        self._cluster = cluster
        return ValkeyTier(config(cluster.url, mode="cluster"))

    def server_of(self, name: str) -> Server:
        return self._cluster.servers[slot_of(name.encode()) * 3 // 16384]


class ValkeyMachine(TierMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)
    late_effects = True
    server: ClassVar[Server]

    def make_tier(self, directory: Path, max_bytes: int | None) -> ValkeyTier:
        del max_bytes
        return ValkeyTier(config(self.server.url, key_prefix=f"{directory.name}:", connections=2))

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return edit_value(self.server, self.tier.config.key_prefix + key.hex(), edit)


class TestValkeyMachine(ValkeyMachine.TestCase):
    settings = machine_settings(25)

    @pytest.fixture(autouse=True)
    def _server(self, server):
        ValkeyMachine.server = server
