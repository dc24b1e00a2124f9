"""Concurrent stores, loads, lookups and cancellations with arena and disk full. Memory, files and threads may not grow."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch
import uvloop

from lmcache_async.engine.engine import CacheEngine
from tools.torture.outcome import Outcome
from tools.torture.prompts import WIPED, Bench, disk_tiers, quiet
from tools.torture.trend import Sample, sample, trend

CALLERS = 6
SLOTS = 48  # per caller
FAMILIES, BRANCHES = 24, 8
"""Prompts of a family share a prefix. All prompts together are about ten times the size of the arena."""
DISK_RECORDS = 200
SAMPLES = 200
WARM_UP = 5_000  # operations until thread pools and the allocator have grown to their sizes
CALL_TIMEOUT_S = 60.0
GROWTH_BYTES = 4 << 20
"""Allowed difference of the means of two quarters, caused by the allocator."""


class Churn:
    """Callers that use one engine concurrently, each with its own slots.

    Attributes:
        done: Number of finished operations.
    """

    def __init__(self, bench: Bench, engine: CacheEngine, outcome: Outcome, seed: int) -> None:
        self.done = 0
        self._rig = bench.rig
        self._engine = engine
        self._outcome = outcome
        self._random = random.Random(seed)
        self._prompts = [
            [
                1 + family,
                *(7 * family + i for i in range(15)),
                *(branch * 31 + i for i in range(1 + 3 * branch)),
            ]
            for family in range(FAMILIES)
            for branch in range(BRANCHES)
        ]
        self._contents = [bench.rig.content(tokens) for tokens in self._prompts]

    async def call_until(self, operations: int, caller: int) -> None:
        slots = range(caller * SLOTS, (caller + 1) * SLOTS)
        while self.done < operations and not self._outcome.aborted:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._call(slots, caller)
            self.done += 1

    async def _call(self, slots: range, caller: int) -> None:
        draw = self._random.random()
        index = self._random.randrange(len(self._prompts))
        tokens = self._prompts[index]
        if draw < 0.35:
            await self._engine.lookup(tokens)
        elif draw < 0.45:
            await self._engine.lookup(tokens, lookup_id=f"{caller}")
            self._engine.unpin(f"{caller}")
        elif draw < 0.75:
            await self._retrieve(index, slots)
        elif draw < 0.80:
            await self._engine.prefetch(tokens)
        elif draw < 0.97:
            await self._store(index, slots)
        else:
            await self._cancelled(index, slots)

    async def _store(self, index: int, slots: range) -> None:
        tokens = self._prompts[index]
        self._rig.write(slots[: len(tokens)], self._contents[index])
        report = await self._engine.store(tokens, slots[: len(tokens)])
        self._outcome.add("chunks stored", report.stored)

    async def _retrieve(self, index: int, slots: range) -> None:
        tokens, content = self._prompts[index], self._contents[index]
        self._rig.write(slots, torch.full((self._rig.layers, 2, len(slots), content.shape[-1]), WIPED))
        mask = await self._engine.retrieve(tokens, slots[: len(tokens)])
        hit = int(mask.sum())
        self._outcome.add("tokens loaded", hit)
        found = self._rig.read(slots)
        right = torch.equal(found[:, :, :hit], content[:, :, :hit]) and bool(
            (found[:, :, hit:] == WIPED).all()
        )
        self._outcome.expect(
            right and bool(mask[:hit].all()), f"prompt {index}: wrong bytes after {self.done}"
        )

    async def _cancelled(self, index: int, slots: range) -> None:
        tokens = self._prompts[index]
        verb = self._random.choice((self._engine.store, self._engine.retrieve))
        if verb == self._engine.store:
            self._rig.write(slots[: len(tokens)], self._contents[index])
        task = asyncio.ensure_future(verb(tokens, slots[: len(tokens)]))
        for _ in range(self._random.randrange(30)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        self._outcome.add("calls cancelled")


async def _campaign(operations: int, seconds: float, seed: int, path: Path, outcome: Outcome) -> list[Sample]:
    bench = Bench(slabs=64)
    limit = DISK_RECORDS * bench.rig.slab_bytes
    samples: list[Sample] = []
    deadline = time.monotonic() + seconds
    async with bench.rig.open(registry=bench.registry, tiers=disk_tiers(path, limit)) as engine:
        churn = Churn(bench, engine, outcome, seed)
        while churn.done < operations and not outcome.aborted:
            if len(samples) >= 8 and time.monotonic() > deadline:
                break
            step = churn.done + max(operations // SAMPLES, 1)
            async with asyncio.TaskGroup() as group:
                for caller in range(CALLERS):
                    group.create_task(churn.call_until(step, caller))
            await engine.flush(timeout_s=CALL_TIMEOUT_S)
            gc.collect()
            samples.append(sample(churn.done))
            _check(engine, limit, outcome)
            outcome.progress(churn.done, operations, "operations")
        found = engine.statistics()
        await engine.clear(memory_only=True)  # reveals leases of slabs that the tier holds too
        left = engine.statistics().arena.leased_slabs
        outcome.expect(left == 0, f"{left} slabs are still leased after memory was cleared")
        outcome.counts |= {
            "operations": churn.done,
            "evictions from memory": found.tiers["cpu"].evictions,
            "evictions from disk": found.tiers["disk"].evictions,
        }
    return samples


def _check(engine: CacheEngine, limit: int, outcome: Outcome) -> None:
    found = engine.statistics()
    held = found.arena.leased_slabs - found.tiers["cpu"].chunks
    outcome.expect(held == 0 and found.running == 0, f"{held} leases are lost: {found.arena}")
    outcome.expect(
        found.tiers["disk"].bytes <= limit, f"the disk has {found.tiers['disk'].bytes} bytes of {limit}"
    )


def judge(samples: list[Sample], outcome: Outcome) -> None:
    """Check whether memory, files or threads grew, unless the run was mostly warm-up."""
    if samples[-1].operations < WARM_UP:
        outcome.counts["trend"] = f"none: fewer than {WARM_UP:,} operations"
        return
    at = [one.operations for one in samples]
    rss = trend(at, [one.rss for one in samples])
    outcome.counts |= {
        "rss MiB, second quarter": round(rss.second_quarter / 2**20, 2),
        "rss MiB, last quarter": round(rss.last_quarter / 2**20, 2),
        "rss KiB per million operations": round(rss.per_million / 1024, 1),
    }
    outcome.expect(rss.growth <= GROWTH_BYTES, f"RSS grew by {rss.growth / 2**20:.1f} MiB")
    # The thread of the disk tier that writes times of use starts after about a minute.
    for name, allowed in (("descriptors", 0), ("threads", 1)):
        values = [getattr(one, name) for one in samples]
        outcome.counts[name] = values[-1]
        growth = trend(at, values).growth
        outcome.expect(growth <= allowed, f"{name} grew from {values[len(values) // 4]} to {values[-1]}")


def run(*, operations: int, seconds: float, seed: int) -> Outcome:
    """Run `operations`, or fewer if `seconds` are over before."""
    outcome = Outcome("churn", {"operations": 0, "seed": seed})
    path = Path(tempfile.mkdtemp(prefix="lmcache-async-churn-"))
    try:
        with quiet():
            samples = uvloop.run(_campaign(operations, seconds, seed, path, outcome))
    finally:
        shutil.rmtree(path)
    judge(samples, outcome)
    return outcome.end()
