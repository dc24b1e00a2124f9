"""One run of a backend under a load: utilisation, waits and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.scale.backends import BACKENDS, Machines
from tools.scale.load import TRACES, Load
from tools.scale.queueing import run

FULL = 0.8
"""Utilisation above which a station counts as the bottleneck, because waits rise steeply."""
FORGETS = 0.5
"""Minimum share of the possible hits; below it the pool is too small."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run.

    Attributes:
        busy: Mean offered load by kind of station; 1 is its capacity.
        reads: The kinds of stations that loads pass.
        loads_s: Duration of each load, in order of arrival.
        waits_s: Duration of each load in excess of that in an idle system.
        connections: Share of the maximum connections of a server.
    """

    load: Load
    busy: Mapping[str, float]
    reads: frozenset[str]
    loads_s: Sequence[float]
    waits_s: Sequence[float]
    connections: float

    @property
    def first(self) -> str:
        """Return the bottleneck: an overloaded station, a too small pool, or else the busiest station."""
        busiest = max(self.busy, key=lambda kind: self.busy[kind])
        if self.connections > 1:
            return "connections"
        if self.busy[busiest] > FULL:
            return busiest
        if self.load.hits < FORGETS * TRACES[self.load.trace].repeated:
            return "capacity"
        return f"none ({busiest})"

    def wait_s(self, share: float) -> float:
        """Return a quantile of the waits; infinite for an overloaded station."""
        full = any(self.busy[kind] >= 1 for kind in self.reads)
        return math.inf if full else percentile(self.waits_s, share)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a quantile of the values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def simulate(name: str, load: Load, machines: Machines, *, requests: int = 600, seed: int = 1) -> Result:
    """Run the same requests twice: at their arrival times, and each alone."""
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
