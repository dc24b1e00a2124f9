"""What a simulation came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_async.testing.simulation.faults import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What a simulation came to.

    Attributes:
        seed: What it was drawn from.
        steps: Operations asked for.
        faults: How much went wrong.
        made: Operations made; fewer than `steps` when a violation ended it, a few more when not.
        decisions: Steps that its event loops took.
        digest: 32 hex digits over every decision: equal in every run of the same seed.
        virtual_s: Seconds that it took in the simulation.
        real_s: Seconds that it took here.
        counts: Operations by name, crashes, starts, hits.
        violation: What must not have happened; "" when all is well.
        serving: Whether it was vLLM's scheduler and the connector over the engine, or the engine alone.
        last_steps: The last operations before a violation.
        last_decisions: The last steps of the loop before it.
    """

    seed: int
    steps: int
    faults: Faults
    made: int
    decisions: int
    digest: str
    virtual_s: float
    real_s: float
    counts: Mapping[str, int]
    violation: str
    last_steps: tuple[str, ...]
    last_decisions: tuple[str, ...]
    serving: bool = False

    @property
    def command(self) -> str:
        """What replays it to the letter."""
        what = " --serving" if self.serving else ""
        return f"lmcache-async simulate{what} --seed {self.seed} --steps {self.steps} --faults {self.faults}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"command": self.command}
