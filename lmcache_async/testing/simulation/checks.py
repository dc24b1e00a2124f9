"""What holds once nothing is under way: nothing is leased, reserved, running or queued."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.testing.simulation.errors import Violation
from lmcache_async.testing.simulation.loop import SimulatedLoop
from lmcache_async.testing.simulation.scenario import CLIENTS

if TYPE_CHECKING:
    from lmcache_async.testing.simulation.world import World

SETTLE_S = 10.0
POLL_S = 0.01


async def settle(world: World, engine: CacheEngine) -> None:
    """Let the weather clear, end every pin, and wait until nothing is under way any more."""
    world.scenario.weather.calm()
    for client in range(CLIENTS):
        for number in range(3):
            engine.unpin(f"{client}-{number}")
    since = world.model.begin_flush()
    if not await engine.flush(timeout_s=SETTLE_S):
        raise Violation(f"a flush in fair weather did not end in {SETTLE_S} s of virtual time")
    world.model.flushed(since)
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (statistics := engine.statistics()).late_calls or statistics.running:
        if asyncio.get_running_loop().time() > deadline:
            raise Violation(
                f"after {SETTLE_S} s of fair weather {statistics.running} calls and "
                f"{statistics.late_calls} calls given up still run"
            )
        await asyncio.sleep(POLL_S)


def check_settled(world: World, engine: CacheEngine, loop: SimulatedLoop, own_tasks: int) -> None:
    """Everything is given back; what is counted is what is there; no tier holds more than it may."""
    statistics = engine.statistics()
    if statistics.arena.lingering_slabs:
        gc.collect()  # an error's traceback may still know a buffer's array
        statistics = engine.statistics()
    kept = statistics.tiers["cpu"].chunks if "cpu" in statistics.tiers else 0
    _equal("slabs leased, beside those of the cpu tier,", statistics.arena.leased_slabs - kept, 0)
    _equal("calls waiting for slabs", statistics.arena.waiting, 0)
    _equal("chunks pinned", statistics.pinned_chunks, 0)
    check_always(engine)
    for name, writer in statistics.writers.items():
        _equal(f"bytes queued for {name!r}", writer.queued_bytes, 0)
    runners = engine._runners
    for runner in (runners.store, runners.retrieve, runners.prefetch):
        _equal("bytes reserved by runners", runner._budget.statistics().used_bytes, 0)
    _equal("tasks beyond the engine's own", len(loop.live_tasks()) - own_tasks, 0)
    _check_counts(world, engine)
    _check_complaints(world, loop)


async def check_closed(world: World, engine: CacheEngine, loop: SimulatedLoop) -> None:
    """Closed, an engine leaves nothing behind but calls that do not end, and these end in fair weather."""
    world.scenario.weather.calm()
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
    """What holds at every moment: nothing is larger than it may be.

    Raises:
        Violation: Something is.
    """
    statistics = engine.statistics()
    for name, writer in statistics.writers.items():
        if writer.queued_bytes > writer.max_bytes:
            raise Violation(f"{writer.queued_bytes} bytes wait for {name!r}, of at most {writer.max_bytes}")
    for name, tier in statistics.tiers.items():
        if tier.max_bytes is not None and tier.bytes > tier.max_bytes:
            raise Violation(f"tier {name!r} holds {tier.bytes} bytes of at most {tier.max_bytes}")


def _check_counts(world: World, engine: CacheEngine) -> None:
    """What was damaged by nobody is never found damaged; where nothing fails, no error is counted."""
    odds = world.scenario.weather.odds
    damage = odds.corrupt or odds.rot or odds.torn
    for name, count in engine.statistics().counts.items():
        if ".corrupt." in name and not damage:
            raise Violation(f"{count} records were found damaged, but nothing damages any: {name}")
        if ".errors." in name and world.model.all_fits:
            raise Violation(f"{count} errors were counted, but nothing fails: {name}")


def _check_complaints(world: World, loop: SimulatedLoop) -> None:
    if loop.unhandled:
        raise Violation(f"told to nobody but the event loop: {loop.unhandled[0]}")
    for name, backend in world.scenario.backends.items():
        if backend.complaints:
            raise Violation(f"tier {name!r}: {backend.complaints[0]}")


def _equal(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise Violation(f"nothing is under way, but {what} are {found}, not {expected}")
