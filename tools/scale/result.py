"""One run of a backend under a load: how busy each kind of station is, what loads wait, what breaks first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.scale.backends import BACKENDS, Machines
from tools.scale.load import TRACES, Load
from tools.scale.queueing import run

FULL = 0.8
"""Of a station, above which it is said to break: waits rise steeply from there on."""
FORGETS = 0.5
"""Of what could be hit; a pool that gives less is too small."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came out.

    Attributes:
        busy: Work that comes in a second, by kind of station: 1 is all that it can do. The mean of a kind.
        reads: The kinds that loads pass.
        loads_s: Time of each load, in the order in which they came.
        waits_s: What each took longer than it takes with nothing else under way.
        connections: Share of those that one server may have.
    """

    load: Load
    busy: Mapping[str, float]
    reads: frozenset[str]
    loads_s: Sequence[float]
    waits_s: Sequence[float]
    connections: float

    @property
    def first(self) -> str:
        """What breaks first: too busy, then too small, else the busiest."""
        busiest = max(self.busy, key=lambda kind: self.busy[kind])
        if self.connections > 1:
            return "connections"
        if self.busy[busiest] > FULL:
            return busiest
        if self.load.hits < FORGETS * TRACES[self.load.trace].repeated:
            return "capacity"
        return f"none ({busiest})"

    def wait_s(self, share: float) -> float:
        """That so many loads do not exceed; infinite where more comes than what they pass can do."""
        full = any(self.busy[kind] >= 1 for kind in self.reads)
        return math.inf if full else percentile(self.waits_s, share)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def simulate(name: str, load: Load, machines: Machines, *, requests: int = 600, seed: int = 1) -> Result:
    """The same requests twice: as they come, and each of them alone."""
    backend = BACKENDS[name](load, machines, seed)
    coming = list(load.requests(requests, seed))
    loads, stores = backend.jobs(coming)
    took = run([*loads, *stores])[: len(loads)]
    span_s = coming[-1][0]
    busy = {
        kind: sum(station.busy_s for station in stations) / sum(s.servers for s in stations) / span_s
        for kind, stations in backend.kinds.items()
    }
    passed = {station for job in loads for piece in (job.first, *job.pieces) for station, _ in piece}
    reads = frozenset(kind for kind, stations in backend.kinds.items() if passed & set(stations))
    alone = [run([replace(job, at_s=0.0)])[0] for job in loads]
    waits = [max(0.0, one - other) for one, other in zip(took, alone, strict=True)]
    connections = load.engines * backend.connections_an_engine / backend.max_connections
    return Result(load, busy, reads, took, waits, connections)
