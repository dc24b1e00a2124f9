"""The parts of every simulation, and how one is run to a report."""

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
from typing import Any

from lmcache_async.registry import TIERS, Registry
from tests.simulation.faults import Faults
from tests.simulation.loop import Hang, Trace, Violation, threads_as_steps


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
        return (
            f"python -m tools.simulate{what} --seed {self.seed} --steps {self.steps} --faults {self.faults}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"command": self.command}


class SimulatedRegistry(Registry):
    """The installed plug-ins, and before them the given tiers."""

    def __init__(self, installed: Registry, tiers: Mapping[str, object]) -> None:
        self._installed = installed
        self._tiers = tiers

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        if group == TIERS and name in self._tiers:
            return self._tiers[name]
        return self._installed.load(group, name, third_party=third_party)


class Simulation:
    """A simulated world that runs until its steps are done.

    Attributes:
        step: Operations begun.
        now: Virtual seconds since the beginning, when no process lives.
        counts: What was done.
        frozen: The last operations and the last steps of the loop, once something was found.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self.step = 0
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.frozen: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._recent: deque[str] = deque(maxlen=20)

    def run(self, progress: Callable[[int], object]) -> None:
        """Run to the end.

        Raises:
            Violation: Something happened that must not happen.
        """
        raise NotImplementedError

    def note(self, verb: str) -> None:
        """Take down an operation of the step that runs: `verb`, and perhaps of what."""
        self.counts[verb.partition(" ")[0]] += 1
        self._recent.append(f"{self.step} {verb}")
        self.trace.note(self._recent[-1])

    def freeze(self) -> None:
        """Keep what happened last for the report."""
        if not any(self.frozen):
            steps = tuple(f"{now:.6f} {what}" for now, what, _ in self.trace.recent)
            self.frozen = (tuple(self._recent), steps)


def run_to_report(
    make: Callable[[Path], Simulation],
    *,
    seed: int,
    steps: int,
    faults: Faults,
    progress: Callable[[int], object],
    serving: bool = False,
) -> SimulationReport:
    """Run what `make` makes in an empty folder; whatever it raises is a violation.

    Not to be called where an event loop runs.
    """
    start = time.perf_counter()
    violation = ""
    with (
        TemporaryDirectory(prefix="lmcache-async-", dir=_memory()) as folder,
        threads_as_steps(),
        _no_surprises(),
    ):
        world = make(Path(folder))
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
        serving=serving,
        last_steps=last_steps,
        last_decisions=last_decisions,
    )


@contextlib.contextmanager
def _no_surprises() -> Iterator[None]:
    """Garbage is collected where the simulation says so: when else would differ from run to run."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _memory() -> str | None:
    """A file system in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
