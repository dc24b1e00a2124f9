"""From the config to the topology that it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from lmcache_async.plugins.valkey.cluster import Cluster
from lmcache_async.plugins.valkey.config import ValkeyConfig, make_tls_context, read_credentials
from lmcache_async.plugins.valkey.topology import MakeNode, SentinelServer, SingleServer, Topology
from lmcache_async.resp.access import Credentials
from lmcache_async.resp.dialer import Dialer
from lmcache_async.resp.node import Node

if TYPE_CHECKING:
    import ssl

    from lmcache_async.config.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Access:
    """How servers let us in."""

    credentials: Credentials
    sentinel_credentials: Credentials
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, config: ValkeyConfig) -> Self:
        """From the files and variables that the config names.

        Raises:
            ConfigError: One of them cannot be used.
        """
        return cls(read_credentials(config), read_credentials(config, "sentinel_"), make_tls_context(config))


def make_topology(config: ValkeyConfig, access: Access) -> Topology:
    """Nothing is connected to yet."""
    endpoints = config.address.endpoints
    find_s = 2 * config.lookup_timeout_s
    if config.how == "sentinel":
        sentinels = Dialer(access.sentinel_credentials, access.tls, config.connect_timeout_s, kind="sentinel")
        make_node = _node_maker(config, access, master_only=True)
        return SentinelServer(endpoints, config.sentinel_service, sentinels, make_node, timeout_s=find_s)
    if config.how == "cluster":
        return Cluster(endpoints, _node_maker(config, access, pause_s=config.node_pause_s), timeout_s=find_s)
    return SingleServer(endpoints[0], _node_maker(config, access))


def _node_maker(
    config: ValkeyConfig, access: Access, *, master_only: bool = False, pause_s: float = 0.0
) -> MakeNode:
    dialer = Dialer(
        access.credentials,
        access.tls,
        config.connect_timeout_s,
        database=config.address.database,
        master_only=master_only,
    )

    def make(endpoint: Endpoint, on_trouble: Callable[[], None]) -> Node:
        return Node(
            endpoint,
            dialer,
            connections=config.connections,
            lookup_timeout_s=config.lookup_timeout_s,
            transfer_timeout_s=config.transfer_timeout_s,
            pause_s=pause_s,
            on_trouble=on_trouble,
        )

    return make
