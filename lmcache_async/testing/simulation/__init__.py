"""Deterministic simulation: the real engine in virtual time, with everything that can go wrong going wrong."""

from lmcache_async.testing.simulation.errors import Deadlock, Hang, Violation
from lmcache_async.testing.simulation.faults import Faults
from lmcache_async.testing.simulation.loop import SimulatedLoop, new_loop
from lmcache_async.testing.simulation.report import SimulationReport
from lmcache_async.testing.simulation.trace import Trace
from lmcache_async.testing.simulation.world import simulate

__all__ = [
    "Deadlock",
    "Faults",
    "Hang",
    "SimulatedLoop",
    "SimulationReport",
    "Trace",
    "Violation",
    "new_loop",
    "simulate",
]
