"""A simulation of the engine: successive processes over the same backends, their clients, and the checks."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import torch

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import EngineClosedError, TierError
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.instrument import Instrument
from lmcache_async.metrics.samples import Samples
from lmcache_async.pipeline.batch import StoreRequest
from lmcache_async.registry import TIERS
from lmcache_async.testing.fakes import FakeRegistry, installed
from lmcache_async.tiers.base import Tier
from lmcache_async.types import StoreReport
from tests.simulation.base import Simulation, run_simulation
from tests.simulation.faults import STALL_SECONDS, Faults
from tests.simulation.loop import ProcessCrashed, SimulatedLoop, Violation, abandon, new_loop
from tests.simulation.model import Model, Promise, Prompt, Region, make_regions
from tests.simulation.scenario import (
    CHUNK,
    CLIENTS,
    FILES,
    MAX_TOKENS,
    RETRIEVE_S,
    SHUTDOWN_S,
    STORE_S,
    draw_scenario,
)
from tests.simulation.tiers import Disk, tier_over

SETTLE_S = 10.0
POLL_S = 0.01


async def settle(world: World, engine: CacheEngine) -> None:
    """End all faults and pins, and wait until nothing runs."""
    world.scenario.injector.stop()
    for client in range(CLIENTS):
        for number in range(3):
            engine.unpin(f"{client}-{number}")
    since = world.model.begin_flush()
    if not await engine.flush(timeout_s=SETTLE_S):
        raise Violation(f"a flush without faults did not end in {SETTLE_S} s of virtual time")
    world.model.flushed(since)
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (statistics := engine.statistics()).late_calls or statistics.running:
        if asyncio.get_running_loop().time() > deadline:
            raise Violation(
                f"after {SETTLE_S} s without faults {statistics.running} calls and "
                f"{statistics.late_calls} abandoned calls still run"
            )
        await asyncio.sleep(POLL_S)


def check_settled(world: World, engine: CacheEngine, loop: SimulatedLoop, own_tasks: int) -> None:
    """Check that all is released, the counts are right, and no tier exceeds its capacity."""
    statistics = engine.statistics()
    if statistics.arena.lingering_slabs:
        gc.collect()  # the traceback of an error may refer to a buffer's array
        statistics = engine.statistics()
    kept = statistics.tiers["cpu"].chunks if "cpu" in statistics.tiers else 0
    _equal("slabs leased, beside those of the cpu tier,", statistics.arena.leased_slabs - kept, 0)
    _equal("calls waiting for slabs", statistics.arena.waiting, 0)
    _equal("chunks pinned", statistics.pinned_chunks, 0)
    check_always(engine)
    for name, writer in statistics.writers.items():
        _equal(f"bytes queued for {name!r}", writer.queued_bytes, 0)
    for group in engine._parts.groups:
        for runner in (group.store, group.retrieve, group.prefetch):
            _equal("bytes reserved by runners", runner.budget.statistics().used_bytes, 0)
    _equal("tasks beyond the engine's own", len(loop.live_tasks()) - own_tasks, 0)
    _check_counts(world, engine)
    check_metrics(engine.metrics.read(), world.samples)
    world.samples = engine.metrics.read()
    _check_complaints(world, loop)


IDLE_GAUGES = (
    "running",
    "pinned_chunks",
    "late_calls",
    "arena_waiting",
    "queue_chunks",
    "queue_bytes",
    "tier_calls_in_flight",
    "limit_used",
    "limit_waiting",
)
"""Gauges that are 0 when nothing is under way."""


def check_metrics(samples: Samples, former: Samples) -> None:
    """Check the metrics of an idle engine: gauges are 0, counters have not decreased, and the sums agree."""
    for name in IDLE_GAUGES:
        _equal(name, int(samples.total(name)), 0)
    for series, labels, value in samples:
        before = former.get(series.name, *labels)
        if series.kind != "gauge" and before is not None:
            pairs = zip(value, before, strict=True) if isinstance(value, tuple) else [(value, before)]
            if any(after < earlier for after, earlier in pairs):
                raise Violation(f"{series.name}{labels} has decreased from {before} to {value}")
    total = samples.total
    for counter, histogram in (
        ("retrieves_total", "retrieve_seconds"),
        ("stores_total", "store_seconds"),
        ("stores_total", "store_copy_seconds"),
    ):
        observed = samples.get(histogram)
        _equal(histogram, int(sum(observed[1:])), int(total(counter)))
    for part, whole in (
        ("retrieve_hit_tokens_total", "retrieve_asked_tokens_total"),
        ("shared_chunks_total", "stored_chunks_total"),
        ("tier_call_found_chunks_total", "tier_call_chunks_total"),
    ):
        if total(part) > total(whole):
            raise Violation(f"{part} is {total(part)}, more than {whole} of {total(whole)}")


async def check_closed(world: World, engine: CacheEngine, loop: SimulatedLoop) -> None:
    """Check that a closed engine leaves only calls that hang, and that these end when faults end."""
    world.scenario.injector.stop()
    deadline = loop.time() + SETTLE_S
    while len(loop.live_tasks()) > 1:
        if loop.time() > deadline:
            names = [str(task.get_coro()) for task in loop.live_tasks()]
            raise Violation(f"{SETTLE_S} s after the engine was closed these still run: {names}")
        await asyncio.sleep(POLL_S)
    arena = engine._parts.arena
    if arena.statistics().leased_slabs:
        gc.collect()
    _equal("slabs leased after the end", arena.statistics().leased_slabs, 0)
    _check_complaints(world, loop)


def check_always(engine: CacheEngine) -> None:
    """Check the limits that hold at every moment."""
    statistics = engine.statistics()
    # While a tier is slow, `writer.max_bytes` falls below what was queued before; the configured bound always holds.
    most = max(engine.config.max_pending_write_bytes, statistics.arena.slab_bytes)
    for name, writer in statistics.writers.items():
        if writer.queued_bytes > most:
            raise Violation(f"{writer.queued_bytes} bytes wait for {name!r}, of at most {most}")
    for name, tier in statistics.tiers.items():
        if tier.max_bytes is not None and tier.bytes > tier.max_bytes:
            raise Violation(f"tier {name!r} holds {tier.bytes} bytes of at most {tier.max_bytes}")


def _check_counts(world: World, engine: CacheEngine) -> None:
    """Check that only injected damage counts as corruption, and that without faults no error is counted."""
    odds = world.scenario.injector.odds
    damage = odds.corrupt or odds.rot or odds.torn
    for name, count in engine.statistics().counts.items():
        if ".corrupt." in name and not damage:
            raise Violation(f"{count} records were found damaged, but nothing damages any: {name}")
        if ".errors." in name and world.model.all_fits:
            raise Violation(f"{count} errors were counted, but nothing fails: {name}")


def _check_complaints(world: World, loop: SimulatedLoop) -> None:
    if loop.unhandled:
        raise Violation(f"error reported to the event loop only: {loop.unhandled[0]}")
    for name, backend in world.scenario.backends.items():
        if backend.complaints:
            raise Violation(f"tier {name!r}: {backend.complaints[0]}")


def _equal(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise Violation(f"nothing is under way, but {what} are {found}, not {expected}")


CANCELLED = object()
"""Result of a cancelled call."""


class Client:
    """Runs operations on its own region of device memory.

    Args:
        world: Source of random choices, and recorder of operations.
        engine: The engine.
        region: Device memory of this client.
        name: Prefix of its lookup ids.
    """

    def __init__(self, world: World, engine: CacheEngine, region: Region, name: str) -> None:
        self._world = world
        self._model = world.model
        self._rng = world.rng
        self._engine = engine
        self._region = region
        self._name = name
        self._verbs: tuple[Callable[[], Awaitable[None]], ...]
        self._verbs, self._weights = zip(
            (self._store, 30),
            (self._retrieve, 34),
            (self._lookup, 12),
            (self._prefetch, 8),
            (self._unpin, 5),
            (self._pause, 5),
            (self._flush, 4),
            (self._clear, 2),
            strict=True,
        )

    async def run(self, operations: int) -> None:
        """Run operations one after another. Stop early if the engine is closed."""
        for _ in range(operations):
            [verb] = self._rng.choices(self._verbs, self._weights)
            self._world.begin_step(verb.__name__)
            try:
                await verb()
                check_always(self._engine)
            except EngineClosedError:
                if not self._world.closing:
                    raise
                return
            except Exception:
                self._world.freeze()  # later steps are no cause of the error
                raise

    # Operations.

    async def _store(self) -> None:
        prompt = self._world.draw_prompt()
        region, model = self._region, self._model
        region.write(prompt.content)
        begun, copied, epoch = False, 0, model.epoch

        def on_copied() -> None:
            nonlocal copied
            copied += 1
            region.poison()  # a later read would store poison

        async def store_chunks() -> StoreReport:
            nonlocal begun
            begun = True
            model.begin(prompt, store=True)
            request = StoreRequest(
                tokens=prompt.tokens,
                row_ids=region.rows[: len(prompt.tokens)],
                root=self._engine._root(prompt.request_namespace),
                request_namespace=self._engine._label(prompt.request_namespace),
                on_copied=on_copied,
            )
            return await self._engine.store_chunks(request)

        async def store() -> StoreReport:
            model.begin(prompt, store=True)
            return await self._engine.store(prompt.tokens, region.rows, namespace=prompt.request_namespace)

        if self._rng.random() < 0.5:
            report = await self._call(store_chunks(), STORE_S, twice=True)
            for _ in range(10_000):  # after a second cancellation the call returns before the copy has ended
                if copied or not begun:
                    break
                await asyncio.sleep(1e-3)
            if copied != begun:
                raise Violation(f"the end of a store's copy was told {copied} times, not {int(begun)}")
        else:
            report = await self._call(store(), STORE_S)
        region.poison()
        self._note_stored(prompt, report, epoch)

    def _note_stored(self, prompt: Prompt, report: StoreReport | object, epoch: int) -> None:
        if not isinstance(report, StoreReport):
            return
        given = report.stored + report.present + sum(report.dropped.values())
        if given != len(prompt.chunks):
            raise Violation(f"a store of {len(prompt.chunks)} chunks answers for {given}: {report}")
        if not report.dropped:
            self._model.stored(prompt, since=epoch)
        elif self._model.all_fits:
            raise Violation(f"there was room for everything, but a store dropped {dict(report.dropped)}")

    async def _retrieve(self) -> None:
        prompt = self._world.draw_prompt()
        num_tokens = len(prompt.tokens)
        skip = self._rng.randrange(num_tokens) if self._rng.random() < 0.3 else 0
        mask: torch.Tensor | None = None
        rows = self._region.rows
        if skip and self._rng.random() < 0.5:
            mask = torch.ones(num_tokens, dtype=torch.bool)
            mask[:skip] = False
        elif skip:
            rows = rows.copy()
            rows[:skip] = -1
        promise = Promise()

        async def retrieve() -> torch.Tensor:
            nonlocal promise
            self._model.begin(prompt, store=False)
            promise = self._model.promise(prompt, skip // CHUNK)
            return await self._engine.retrieve(
                prompt.tokens, rows, mask=mask, namespace=prompt.request_namespace
            )

        result = await self._call(retrieve(), RETRIEVE_S)
        if result is CANCELLED:
            self._region.poison()
            return
        hit = np.flatnonzero(result.numpy())
        stop = skip + len(hit)
        if len(hit) and (hit[0] != skip or hit[-1] != stop - 1):
            raise Violation(f"the mask is not of the form F*T*F* from token {skip} on: {hit.tolist()}")
        self._check_bounds(prompt, skip, stop, promise)
        self._region.check(prompt.content, skip, stop)
        self._world.count("hit tokens", len(hit))

    async def _lookup(self) -> None:
        prompt = self._world.draw_prompt()
        lookup_id = f"{self._name}-{self._rng.randrange(3)}" if self._rng.random() < 0.5 else None
        promise = Promise()

        async def lookup() -> int:
            nonlocal promise
            promise = self._model.promise(prompt)
            return await self._engine.lookup(
                prompt.tokens, namespace=prompt.request_namespace, lookup_id=lookup_id
            )

        found = await self._call(lookup(), RETRIEVE_S)
        if found is not CANCELLED:
            self._check_bounds(prompt, 0, found, promise, unread=True)

    async def _prefetch(self) -> None:
        prompt = self._world.draw_prompt()
        promise = Promise()

        async def prefetch() -> int:
            nonlocal promise
            self._model.begin(prompt, store=False)
            promise = self._model.promise(prompt)
            return await self._engine.prefetch(prompt.tokens, namespace=prompt.request_namespace)

        found = await self._call(prefetch(), RETRIEVE_S)
        config = self._engine.config
        if config.tiers[0].id != "cpu" or not config.retrieve.promote:
            promise = replace(promise, least=0)  # no chunk gets a place in host memory
        if found is not CANCELLED:
            self._check_bounds(prompt, 0, found, promise)

    async def _unpin(self) -> None:
        self._engine.unpin(f"{self._name}-{self._rng.randrange(3)}")

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 1e-3, 0.1)) * self._rng.random())

    async def _flush(self) -> None:
        since = self._model.begin_flush()
        if await self._call(self._engine.flush(timeout_s=1.0), 1.0) is True:
            self._model.flushed(since)
            if self._rng.random() < 0.1:
                self._world.crash_now()

    async def _clear(self) -> None:
        memory_only = self._rng.random() < 0.5
        self._model.begin_clear(memory_only=memory_only)
        done = False
        try:
            tiers_s = self._world.scenario.slow_tiers * self._world.scenario.call_s
            clearing = self._engine.clear(memory_only=memory_only)
            done = await self._call(clearing, 2 * STORE_S + tiers_s) is not CANCELLED
        except TierError as error:
            if self._model.all_fits and not self._world.closing:
                raise Violation(f"nothing fails, but a clearing did: {error}") from None
        finally:
            self._model.end_clear(memory_only=memory_only, done=done)
        if done:  # late writes may still arrive now
            await self._pause()
            for _ in range(3):
                await self._lookup()

    # Helpers of the operations.

    async def _call(self, coroutine: Coroutine[Any, Any, Any], limit_s: float, *, twice: bool = False) -> Any:
        """Run a call and check its duration. The call may be cancelled.

        Args:
            limit_s: Deadline of the call, in virtual seconds.
            twice: Whether a cancelled call may be cancelled again before it ends.

        Returns:
            The result, or CANCELLED.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        if self._rng.random() >= self._world.scenario.injector.odds.cancel:
            answer = await coroutine
        else:
            task = loop.create_task(coroutine)
            await self._while_it_runs(task)
            task.cancel()
            if twice and self._rng.random() < 0.5:
                await self._while_it_runs(task)
                task.cancel()
            await asyncio.wait({task})
            answer = CANCELLED if task.cancelled() else task.result()
            self._world.count("cancelled", answer is CANCELLED)
        seconds = loop.time() - start
        if seconds > limit_s + self._world.slack_s:
            raise Violation(f"a call took {seconds:.3f} s of virtual time; its deadline is {limit_s} s")
        return answer

    async def _while_it_runs(self, task: asyncio.Task[Any]) -> None:
        if self._rng.random() < 0.7:
            for _ in range(self._rng.randrange(60)):
                await asyncio.sleep(0)
        else:
            await asyncio.wait({task}, timeout=self._rng.choice((2e-3, 1.0)) * self._rng.random())

    def _check_bounds(
        self, prompt: Prompt, skip: int, stop: int, promise: Promise, *, unread: bool = False
    ) -> None:
        """Check that the hit of tokens `skip` to `stop` is possible and as long as required.

        Args:
            promise: Expectation at the start of the call.
            unread: The records were not read, so a wrong answer of `contains` is accepted.
        """
        first = skip // CHUNK
        ends = [end for _, end in prompt.chunks[first:]]
        least, most = self._model.bounds(promise, prompt, first)
        if stop > skip and stop not in ends:
            raise Violation(f"a hit ends at token {stop}, which is no chunk's end ({ends})")
        if stop > max(skip, ends[most - 1] if most else 0) and not (
            unread and self._world.scenario.injector.odds.lie
        ):
            raise Violation(
                f"a hit up to token {stop}, but of this prompt, in this namespace, "
                f"{most} chunks were ever stored: up to token {ends[most - 1] if most else skip}"
            )
        if least and stop < ends[least - 1]:
            raise Violation(
                f"a miss from token {stop} on, but everything fits, nothing failed, and "
                f"{least} chunks were stored: up to token {ends[least - 1]}"
            )


PATIENCE_S = 1000.0
"""Time limit of a process, in virtual seconds: far longer than all deadlines together."""


class World(Simulation):
    """A sequence of engines and their clients. Made and run by `simulate`.

    Attributes:
        closing: Whether the engine is being closed, so that calls may be rejected.
        slack_s: Allowed delay after a deadline, in seconds, for delays of threads.
    """

    def __init__(self, seed: int, steps: int, faults: Faults, folder: Path) -> None:
        super().__init__(steps)
        self.rng = Random(f"{seed} {faults}")
        self.scenario = draw_scenario(self.rng, faults, folder)
        self.model = Model(all_fits=self.scenario.all_fits, persistent=self.scenario.slow_tiers > 0)
        self.closing = False
        self.samples = Samples()
        self.slack_s = 10 * STALL_SECONDS if self.scenario.injector.odds.stall else 0.1
        self._loop: SimulatedLoop
        self._logger = LimitedLogger(logging.Logger("unheard", logging.CRITICAL + 1))  # noqa: LOG001 - of no tree
        self._regions = make_regions(self.scenario.rig, self.rng, count=CLIENTS, num_rows=MAX_TOKENS)
        tiers: dict[str, object] = {
            f"simulated_{name}": tier_over(backend) for name, backend in self.scenario.backends.items()
        }
        self._disk: Disk | None = None
        if self.scenario.has_files:
            self._disk = Disk(cast("type[Tier]", installed().load(TIERS, "disk")))
            tiers[f"simulated_{FILES}"] = self._disk.tier_class
        self._registry = FakeRegistry(tiers=tiers)

    def begin_step(self, verb: str) -> None:
        self.step += 1
        self.note(verb.strip("_"))

    def count(self, what: str, number: int) -> None:
        self.counts[what] += number

    def crash_now(self) -> None:
        """End the process before its next step."""
        self._loop.crash_at = self.trace.decisions

    def draw_prompt(self) -> Prompt:
        return self.rng.choice(self.rng.choice(self.scenario.prompts))

    def live(self) -> None:
        injector = self.scenario.injector
        loop = self._loop = new_loop(self.rng, self.trace, start=self.now, thread_delay=injector.thread_delay)
        loop.deadline = self.now + PATIENCE_S
        if self.rng.random() < 0.4 and not self._disk:  # a disk tier has to be open before it can be closed
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
            self.model.crash()  # last, because closing the clients' coroutines ends their calls
            if self._disk:
                self._disk.let_go()
            injector.forget()
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
            self.samples = Samples()
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
        self.scenario.injector.start()
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


simulate = functools.partial(run_simulation, World)
