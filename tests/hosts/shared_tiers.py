"""Shared tiers: each starts its servers on a network and returns the settings of each host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.hosts.network import HOSTS, Network
from tests.support.processes import free_port, wait_until

Tiers = dict[str, dict[str, Any]]
"""Settings of the tier by host."""

USUAL = {
    "timeout_s": 2,
    "layers": ["metrics", "retry", {"name": "breaker", "pause_s": 0.5, "max_pause_s": 0.5}, "deadline"],
}
"""The usual layers, with a circuit breaker that opens and retries soon."""


def valkey(network: Network) -> Tiers:
    """One server, on host `a`."""
    port = network.hosts["a"].serve()
    tier = {"name": "valkey", "url": f"valkey://127.0.0.1:{network.way('a', port)}"}
    return dict.fromkeys(HOSTS, tier | USUAL)


def valkey_cluster(network: Network) -> Tiers:
    """A master on each host, with a third of the slots."""
    cluster = Cluster(network)
    cluster.join()
    ways = ",".join(f"127.0.0.1:{port}" for port in cluster.ways.values())
    tier = {"name": "valkey", "url": f"valkey://{ways}", "mode": "cluster"}
    return dict.fromkeys(HOSTS, tier | USUAL)


class Cluster:
    """Three masters; their cluster bus bypasses the proxies."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._buses = {host: free_port() for host in HOSTS}
        self.ports: dict[str, int] = {}
        self.ways: dict[str, int] = {}
        for host in HOSTS:
            options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
            options += ["--cluster-node-timeout", "1000", "--cluster-port", str(self._buses[host])]
            self.ports[host] = network.hosts[host].serve(options)
            self.ways[host] = network.way(host, self.ports[host])
            self._ask(host, "CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
            self._ask(host, "CONFIG", "SET", "cluster-announce-port", str(self.ways[host]))
            self._ask(host, "CONFIG", "SET", "cluster-announce-bus-port", str(self._buses[host]))

    def join(self) -> None:
        """Assign slots and introduce the masters to one another."""
        for index, host in enumerate(HOSTS):
            self._ask(host, "CLUSTER", "ADDSLOTSRANGE", 16384 * index // 3, 16384 * (index + 1) // 3 - 1)
        for host in HOSTS[1:]:
            self._ask(host, "CLUSTER", "MEET", "127.0.0.1", self.ports[HOSTS[0]], self._buses[HOSTS[0]])
        wait_until(lambda: all(self._is_whole(host) for host in HOSTS))

    def _is_whole(self, host: str) -> bool:
        info = self._ask(host, "CLUSTER", "INFO")
        return "cluster_state:ok" in info and "cluster_slots_ok:16384" in info

    def _ask(self, host: str, *words: str | int) -> Any:
        return self._network.hosts[host].ask(self.ports[host], *words)


TIERS: Mapping[str, Callable[[Network], Tiers]] = {
    "valkey": valkey,
    "valkey-cluster": valkey_cluster,
}
