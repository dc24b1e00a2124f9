"""Shared tiers: each runs its servers behind the proxies of a network, and yields the settings of the tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.hosts.network import HOSTS, Network
from tests.support.valkey_servers import running, running_cluster

USUAL = {
    "timeout_s": 2,
    "layers": ["metrics", "retry", {"name": "breaker", "pause_s": 0.5, "max_pause_s": 0.5}, "deadline"],
}
"""The usual layers, with a circuit breaker that opens and retries soon."""


@contextlib.contextmanager
def valkey(network: Network) -> Iterator[dict[str, Any]]:
    """One server, on host `a`."""
    with running() as server:
        yield {"name": "valkey", "url": f"valkey://127.0.0.1:{network.way('a', server.port)}", **USUAL}


@contextlib.contextmanager
def valkey_cluster(network: Network) -> Iterator[dict[str, Any]]:
    """A master on each host, with a third of the slots. Their cluster bus bypasses the proxies."""
    with running_cluster(lambda index, port: network.way(HOSTS[index], port)) as cluster:
        yield {"name": "valkey", "url": cluster.url, "mode": "cluster", **USUAL}


TIERS: Mapping[str, Callable[[Network], contextlib.AbstractContextManager[dict[str, Any]]]] = {
    "valkey": valkey,
    "valkey-cluster": valkey_cluster,
}
