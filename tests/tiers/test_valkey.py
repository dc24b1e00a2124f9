"""The valkey tier: the contract, over a Unix socket, TCP, TLS and a cluster of real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.plugins.valkey.topology import slot_of
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.types import ChunkKey
from tests.support.valkey_servers import Server, ServerCluster, running, running_cluster
from tests.support.valkey_tls import Authority, tls_before
from tests.tiers.valkey_tools import config


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServerCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tls(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A port that speaks TLS, and the file of who signed its certificate."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    with tls_before(server.socket, authority.issue("server")) as port:
        yield port, authority.file


class ValkeyConformance(TierConformance):
    many_keys = 500

    async def damage(self, tier: ValkeyTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        name = tier.config.key_prefix + key.hex()
        server = self.server_of(name)
        content = server.ask("GET", name)
        assert isinstance(content, bytes)
        server.ask("SET", name, edit(content))
        return True

    def server_of(self, name: str) -> Server:
        del name
        return self._server


class TestOverAUnixSocket(ValkeyConformance):
    many_keys = 2000

    @pytest.fixture
    def tier(self, server: Server) -> ValkeyTier:
        self._server = server
        return ValkeyTier(config(server.url))


@pytest.mark.one_loop
class TestOverTCPWithOneConnection(ValkeyConformance):
    @pytest.fixture
    def tier(self, server: Server) -> ValkeyTier:
        self._server = server
        return ValkeyTier(config(f"{server.tcp_url}/3", connections=1))

    async def damage(self, tier: ValkeyTier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        del tier, key, edit
        return False  # the database is another one than that of our tools


class TestOverTLS(ValkeyConformance):
    @pytest.fixture
    def tier(self, server: Server, tls: tuple[int, Path]) -> ValkeyTier:
        self._server = server
        port, authority = tls
        return ValkeyTier(config(f"valkeys://127.0.0.1:{port}", tls_ca_file=authority))


@pytest.mark.one_loop
class TestInACluster(ValkeyConformance):
    @pytest.fixture
    def tier(self, cluster: ServerCluster) -> ValkeyTier:
        self._cluster = cluster
        return ValkeyTier(config(cluster.url, mode="cluster"))

    def server_of(self, name: str) -> Server:
        return self._cluster.servers[slot_of(name.encode()) * 3 // 16384]
