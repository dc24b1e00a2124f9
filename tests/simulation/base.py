"""Base class of simulations, and the function that runs one and returns its report."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from tests.simulation.faults import Faults
from tests.simulation.loop import Hang, Trace, Violation, threads_as_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Result of a simulation.

    Attributes:
        seed: Seed of all random choices.
        steps: Number of operations requested.
        faults: Level of injected faults.
        made: Number of operations run: fewer than `steps` after a violation, otherwise at least `steps`.
        decisions: Number of steps of its event loops.
        digest: 32 hex digits over all decisions: the same in every run of a seed.
        virtual_s: Duration in virtual seconds.
        real_s: Duration in real seconds.
        counts: Number of operations by name, of crashes, starts and hits.
        violation: Description of the violation; "" for none.
        serving: Whether it simulated vLLM's scheduler and the connector too, or the engine alone.
        last_steps: Last operations before the violation.
        last_decisions: Last steps of the loop before the violation.
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
        """Command that replays the simulation exactly."""
        what = " --serving" if self.serving else ""
        return (
            f"python -m tools.simulate{what} --seed {self.seed} --steps {self.steps} --faults {self.faults}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        return dataclasses.asdict(self) | {"command": self.command}


class Simulation:
    """A simulated world that runs until its steps are done.

    Attributes:
        step: Number of operations started.
        now: Virtual seconds since the start of the simulation, while no process runs.
        counts: Number of operations by name.
        frozen: Last operations and last steps of the loop before a violation.
    """

    serving: ClassVar[bool] = False

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.trace = Trace()
        self.step = 0
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.frozen: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._recent: deque[str] = deque(maxlen=20)

    def run(self, progress: Callable[[int], object]) -> None:
        """Run to the end. Raises Violation."""
        while self.step < self._steps:
            self.live()
            progress(self.step)

    def live(self) -> None:
        """Run one process from its start to its crash or end."""
        raise NotImplementedError

    def note(self, verb: str) -> None:
        """Record an operation of the current step."""
        self.counts[verb.partition(" ")[0]] += 1
        self._recent.append(f"{self.step} {verb}")
        self.trace.note(self._recent[-1])

    def freeze(self) -> None:
        """Keep the last operations and steps of the loop for the report."""
        if not any(self.frozen):
            steps = tuple(f"{now:.6f} {what}" for now, what, _ in self.trace.recent)
            self.frozen = (tuple(self._recent), steps)


def run_simulation(
    make: Callable[[int, int, Faults, Path], Simulation],
    seed: int,
    *,
    steps: int,
    faults: Faults = Faults.SOME,
    progress: Callable[[int], object] = lambda step: None,
) -> SimulationReport:
    """Run the simulation that `make` returns for an empty folder. Any exception is reported as a violation.

    Must not be called while an event loop runs in this thread. The same arguments give the same report,
    except for the real duration.
    """
    start = time.perf_counter()
    violation = ""
    with (
        TemporaryDirectory(prefix="lmcache-async-", dir=_memory()) as folder,
        threads_as_steps(),
        _no_surprises(),
    ):
        world = make(seed, steps, faults, Path(folder))
        try:
            world.run(progress)
        except Violation as error:
            world.freeze()
            violation = str(error)
        except (Exception, Hang) as error:  # noqa: BLE001 - nothing that an engine raises should come this far
            world.freeze()
            violation = "".join(traceback.format_exception(error))
    last_steps, last_decisions = world.frozen
    return SimulationReport(
        seed=seed,
        steps=steps,
        faults=faults,
        made=world.step,
        decisions=world.trace.decisions,
        digest=world.trace.digest(),
        virtual_s=world.now,
        real_s=time.perf_counter() - start,
        counts=dict(sorted(world.counts.items())),
        violation=violation,
        serving=world.serving,
        last_steps=last_steps,
        last_decisions=last_decisions,
    )


@contextlib.contextmanager
def _no_surprises() -> Iterator[None]:
    """Disable automatic garbage collection, which would run at different times in each run.

    Existing objects are excluded from later collections for good: `gc.unfreeze` would return those that the
    caller has excluded.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _memory() -> str | None:
    """Return a directory on a file system in memory, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
