"""Deterministic simulation: the real engine in virtual time, with everything that can go wrong going wrong."""

from typing import TYPE_CHECKING

from lmcache_async.testing.simulation.errors import Deadlock, Hang, Violation
from lmcache_async.testing.simulation.faults import Faults
from lmcache_async.testing.simulation.loop import SimulatedLoop, new_loop
from lmcache_async.testing.simulation.report import SimulationReport
from lmcache_async.testing.simulation.trace import Trace

if TYPE_CHECKING:
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

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the engine, and torch with it, when a simulation is to run: not for the help of the command."""
        if name != "simulate":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lmcache_async.testing.simulation.world import simulate

        return simulate
