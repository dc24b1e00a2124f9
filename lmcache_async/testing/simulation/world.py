"""A simulation: processes one after another over the same backends, until the steps are done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import cast

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.observability.instrument import Instrument
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.registry import TIERS, Registry
from lmcache_async.testing.simulation.base import SimulatedRegistry, Simulation, run_to_report
from lmcache_async.testing.simulation.checks import check_closed, check_settled, settle
from lmcache_async.testing.simulation.client import Client
from lmcache_async.testing.simulation.crash import abandon
from lmcache_async.testing.simulation.device import make_regions
from lmcache_async.testing.simulation.errors import ProcessCrashed, Violation
from lmcache_async.testing.simulation.faults import STALL_SECONDS, Faults
from lmcache_async.testing.simulation.files import Disk
from lmcache_async.testing.simulation.loop import SimulatedLoop, new_loop
from lmcache_async.testing.simulation.model import Model
from lmcache_async.testing.simulation.prompts import Prompt
from lmcache_async.testing.simulation.report import SimulationReport
from lmcache_async.testing.simulation.scenario import CLIENTS, FILES, MAX_TOKENS, SHUTDOWN_S, draw_scenario
from lmcache_async.testing.simulation.tier import tier_over
from lmcache_async.tiers.base import Tier

PATIENCE_S = 1000.0
"""Virtual seconds in which a process ends, whatever happens to it: far beyond all deadlines together."""


class World(Simulation):
    """An engine after another, and their callers. Made and run by `simulate`.

    Attributes:
        closing: Whether the engine is being closed, so that its callers may be turned away.
        slack_s: How much later than its deadline a call may end: by as much as threads dawdle.
    """

    def __init__(self, seed: int, steps: int, faults: Faults, installed: Registry, folder: Path) -> None:
        super().__init__()
        self.rng = Random(f"{seed} {faults}")
        self.scenario = draw_scenario(self.rng, faults, folder)
        self.model = Model(all_fits=self.scenario.all_fits, persistent=self.scenario.slow_tiers > 0)
        self.closing = False
        self.slack_s = 10 * STALL_SECONDS if self.scenario.weather.odds.stall else 0.1
        self._steps = steps
        self._loop: SimulatedLoop
        self._logger = LimitedLogger(logging.Logger("unheard", logging.CRITICAL + 1))  # noqa: LOG001 - of no tree
        self._regions = make_regions(self.scenario.rig, self.rng, count=CLIENTS, num_rows=MAX_TOKENS)
        tiers: dict[str, object] = {
            f"simulated_{name}": tier_over(backend) for name, backend in self.scenario.backends.items()
        }
        self._disk: Disk | None = None
        if self.scenario.has_files:
            self._disk = Disk(cast("type[Tier]", installed.load(TIERS, "disk")))
            tiers[f"simulated_{FILES}"] = self._disk.tier_class
        self._registry = SimulatedRegistry(installed, tiers)

    def run(self, progress: Callable[[int], object]) -> None:
        while self.step < self._steps:
            self._live()
            progress(self.step)

    def begin_step(self, verb: str) -> None:
        self.step += 1
        self.note(verb.strip("_"))

    def count(self, what: str, number: int) -> None:
        self.counts[what] += number

    def crash_now(self) -> None:
        """The process ends before its next step."""
        self._loop.crash_at = self.trace.decisions

    def draw_prompt(self) -> Prompt:
        return self.rng.choice(self.rng.choice(self.scenario.prompts))

    def _live(self) -> None:
        """One process, from its start to its crash or its end."""
        weather = self.scenario.weather
        loop = self._loop = new_loop(self.rng, self.trace, start=self.now, thread_delay=weather.thread_delay)
        loop.deadline = self.now + PATIENCE_S
        if self.rng.random() < 0.4 and not self._disk:  # that one has to be open before it can be let go
            self._crash_soon(loop)
        self.closing = False
        try:
            loop.run_until_complete(self._process(loop))
            self.model.closed()
        except ProcessCrashed:
            self.counts["crash"] += 1
            for backend in self.scenario.backends.values():
                backend.crash()
        finally:
            self.now = loop.time()
            abandon(loop)
            self.model.crash()  # last: closing the callers' coroutines has ended what they had begun
            if self._disk:
                self._disk.let_go()
            weather.forget()
            for region in self._regions:
                region.poison()

    def _crash_soon(self, loop: SimulatedLoop) -> None:
        loop.crash_at = self.trace.decisions + int(self.rng.expovariate(1 / 8000))

    async def _process(self, loop: SimulatedLoop) -> None:
        scenario = self.scenario
        self.counts["start"] += 1
        async with CacheEngine.open(
            scenario.config,
            layout=scenario.rig.layout,
            namespace=scenario.rig.namespace,
            instrument=Instrument(),
            logger=self._logger,
            registry=self._registry,
        ) as engine:
            own_tasks = len(loop.live_tasks())
            if self._disk and self.rng.random() < 0.4:
                self._crash_soon(loop)
            for _ in range(self.rng.randint(1, 12)):
                await self._round(engine)
                await settle(self, engine)
                check_settled(self, engine, loop, own_tasks)
                if self.step >= self._steps:
                    break
            late = self._start_clients(engine) if self.rng.random() < 0.5 else []
            for _ in range(self.rng.randrange(100) if late else 0):
                await asyncio.sleep(0)
            self.closing = True
            start = loop.time()
        limit = 2 * SHUTDOWN_S + scenario.slow_tiers * min(SHUTDOWN_S, scenario.call_s) + self.slack_s
        if loop.time() - start > limit:
            raise Violation(f"closing took {loop.time() - start:.3f} s of virtual time, more than {limit}")
        await _all(late)
        await check_closed(self, engine, loop)

    async def _round(self, engine: CacheEngine) -> None:
        self.scenario.weather.storm()
        await _all(self._start_clients(engine))

    def _start_clients(self, engine: CacheEngine) -> list[asyncio.Task[None]]:
        count = self.rng.randint(1, CLIENTS)
        operations = self.rng.randint(1, 12)
        return [
            asyncio.ensure_future(Client(self, engine, region, str(number)).run(operations))
            for number, region in enumerate(self._regions[:count])
        ]


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


def simulate(
    seed: int,
    *,
    steps: int,
    faults: Faults = Faults.SOME,
    installed: Registry | None = None,
    progress: Callable[[int], object] = lambda step: None,
) -> SimulationReport:
    """Run one simulation; what it found is in the report, also when that is a violation.

    Not to be called where an event loop runs. The same arguments give the same report, but for the
    seconds that it took.

    Args:
        seed: Decides everything.
        steps: Operations to make.
        faults: How much goes wrong.
        installed: The plug-ins, where they were read already.
        progress: Called now and then with the operations made so far.
    """
    plugins = installed or Registry()
    return run_to_report(
        lambda folder: World(seed, steps, faults, plugins, folder),
        seed=seed,
        steps=steps,
        faults=faults,
        progress=progress,
    )
