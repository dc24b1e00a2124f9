"""Queueing models of a host pool, a Valkey cluster and a Mooncake pool."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.scale import costs
from tools.scale.load import Load
from tools.scale.queueing import Job, Piece, Station

MAX_PIECES = 8
"""Maximum pieces per request. Longer requests have larger pieces, which keeps a run short."""
GBIT = 1e9 / 8
ENGINES_A_HOST = 8


@dataclass(frozen=True, slots=True)
class Machines:
    """Assumed hardware.

    Attributes:
        nodes: Nodes of a Valkey cluster, or nodes with memory of a Mooncake pool.
        network_gbit: Network of each node and each host of engines, per direction.
        memory_bytes_per_s: Total speed of copies in a host's memory.
        link_bytes_per_s: Speed between a host's memory and one engine's device, per direction.
        connections: Connections of a tier to one node.
        master_threads: Threads of Mooncake's master.
    """

    nodes: int = 8
    network_gbit: float = 25.0
    memory_bytes_per_s: float = 100e9
    link_bytes_per_s: float = 25e9
    connections: int = 4
    master_threads: int = 4

    @property
    def network_bytes_per_s(self) -> float:
        return self.network_gbit * GBIT


class Backend(ABC):
    """Return the stations by kind. Stations of a kind are identical."""

    window = 4
    max_connections: int
    connections_an_engine: int

    def __init__(self, load: Load, machines: Machines, seed: int) -> None:
        self.load = load
        self.machines = machines
        self.kinds: dict[str, list[Station]] = {}
        self._dice = random.Random(seed)

    def kind(self, name: str, count: int, servers: int = 1) -> list[Station]:
        self.kinds[name] = [Station(f"{name} {number}", servers) for number in range(count)]
        return self.kinds[name]

    @abstractmethod
    def lookup(self, chunks: int) -> Piece:
        """Return the pieces of a lookup: one message per prompt."""

    @abstractmethod
    def get(self, engine: int, chunks: int) -> Piece:
        """Return the steps of a transfer of `chunks` chunks from a node to an engine."""

    @abstractmethod
    def put(self, engine: int, chunks: int) -> Piece:
        """Return the steps of a transfer of `chunks` chunks from an engine to a node."""

    def jobs(self, requests: Iterable[tuple[float, int, int, int]]) -> tuple[list[Job], list[Job]]:
        """Return the loads, and the stores after the rest was computed."""
        loads, stores = [], []
        for at_s, engine, loaded, stored in requests:
            asked = self.lookup(loaded + stored)
            first = [*asked, *self.lookup(loaded)]
            loads.append(Job(at_s, first, [self.get(engine, n) for n in _pieces(loaded)], self.window))
            computed_s = at_s + stored * self.load.chunk_tokens / self.load.computed_per_s
            pieces = [self.put(engine, n) for n in _pieces(stored)]
            stores.append(Job(computed_s, self.lookup(loaded + stored), pieces, self.window))
        return loads, stores


def _pieces(chunks: int) -> Sequence[int]:
    count = min(chunks, MAX_PIECES)
    return [chunks * (i + 1) // count - chunks * i // count for i in range(count)]


class HostPool(Backend):
    """One daemon; see docs/tiers/host.md. Large chunks have a message each, small ones share one."""

    max_connections = 256
    connections_an_engine = 1

    def __init__(self, load: Load, machines: Machines, seed: int) -> None:
        super().__init__(load, machines, seed)
        self._loop = self.kind("loop", 1)[0]
        self._memory = self.kind("memory", 1)[0]
        self._links = self.kind("link", load.engines)
        batch = max(1, costs.BATCH_BYTES // load.chunk_bytes)
        self._lease_s = costs.HOST_LEASE.of(batch) / batch
        self._store_s = costs.HOST_STORE.of(batch) / batch

    def lookup(self, chunks: int) -> Piece:
        return [(self._loop, costs.HOST_LOOKUP.of(chunks))]

    def get(self, engine: int, chunks: int) -> Piece:
        nbytes = chunks * self.load.chunk_bytes
        return [
            (self._loop, chunks * self._lease_s),
            (self._memory, nbytes / self.machines.memory_bytes_per_s),
            (self._links[engine], nbytes / self.machines.link_bytes_per_s),
        ]

    def put(self, engine: int, chunks: int) -> Piece:
        nbytes = chunks * self.load.chunk_bytes
        copied_s = nbytes / self.machines.memory_bytes_per_s
        return [(self._loop, chunks * self._store_s), (self._memory, copied_s)]


class _Remote(Backend):
    """A backend with a full-duplex network between engines and nodes."""

    def __init__(self, load: Load, machines: Machines, seed: int) -> None:
        super().__init__(load, machines, seed)
        hosts = -(-load.engines // ENGINES_A_HOST)
        self._out = self.kind("node out", machines.nodes)
        self._in = self.kind("node in", machines.nodes)
        self._host_in = self.kind("host in", hosts)
        self._host_out = self.kind("host out", hosts)

    def network(
        self, lines: Sequence[Station], hosts: Sequence[Station], node: int, engine: int, nbytes: int
    ) -> Piece:
        seconds = nbytes / self.machines.network_bytes_per_s
        return [(lines[node], seconds), (hosts[engine // ENGINES_A_HOST], seconds)]

    def node(self) -> int:
        """Choose a node uniformly, because keys are hashes."""
        return self._dice.randrange(self.machines.nodes)


class ValkeyCluster(_Remote):
    """Each node has one thread."""

    max_connections = 10_000

    def __init__(self, load: Load, machines: Machines, seed: int) -> None:
        super().__init__(load, machines, seed)
        self._threads = self.kind("thread", machines.nodes)
        self.window = machines.connections * machines.nodes
        self.connections_an_engine = machines.connections + 1  # to each node

    def lookup(self, chunks: int) -> Piece:
        """Return the message to one node with its share of the keys, which stands for all nodes."""
        share = chunks / self.machines.nodes
        return [(self._threads[self.node()], self.machines.nodes * costs.VALKEY_LOOKUP.of(share))]

    def get(self, engine: int, chunks: int) -> Piece:
        node, nbytes = self.node(), chunks * self.load.chunk_bytes
        worked_s = chunks * costs.VALKEY_RECORD_S + nbytes * costs.VALKEY_GET_S_PER_BYTE
        return [
            (self._threads[node], worked_s),
            *self.network(self._out, self._host_in, node, engine, nbytes),
        ]

    def put(self, engine: int, chunks: int) -> Piece:
        node, nbytes = self.node(), chunks * self.load.chunk_bytes
        worked_s = chunks * costs.VALKEY_RECORD_S + nbytes * costs.VALKEY_PUT_S_PER_BYTE
        return [
            *self.network(self._in, self._host_out, node, engine, nbytes),
            (self._threads[node], worked_s),
        ]


class MooncakePool(_Remote):
    """A master with the locations of records. Each engine has one reading and one writing thread."""

    max_connections = 10_000
    connections_an_engine = 1

    def __init__(self, load: Load, machines: Machines, seed: int) -> None:
        super().__init__(load, machines, seed)
        self._master = self.kind("master", 1, machines.master_threads)[0]
        self._readers = self.kind("reader", load.engines)
        self._writers = self.kind("writer", load.engines)

    def lookup(self, chunks: int) -> Piece:
        return [(self._master, costs.MASTER_LOOKUP.of(chunks))]

    def get(self, engine: int, chunks: int) -> Piece:
        nbytes = chunks * self.load.chunk_bytes
        return [
            (self._master, chunks * costs.MASTER_RECORD_S),
            (self._readers[engine], nbytes / costs.MOONCAKE_BYTES_PER_S),
            *self.network(self._out, self._host_in, self.node(), engine, nbytes),
        ]

    def put(self, engine: int, chunks: int) -> Piece:
        nbytes = chunks * self.load.chunk_bytes
        return [
            (self._master, chunks * costs.MASTER_RECORD_S),
            (self._writers[engine], nbytes / costs.MOONCAKE_BYTES_PER_S),
            *self.network(self._in, self._host_out, self.node(), engine, nbytes),
        ]


BACKENDS: dict[str, type[Backend]] = {"host": HostPool, "valkey": ValkeyCluster, "mooncake": MooncakePool}
