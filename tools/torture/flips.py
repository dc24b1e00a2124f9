"""Damages records on disk and loads them. No wrong byte may be served."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch
import uvloop

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.types import Chunk
from tools.torture.damage import DAMAGES, Damage
from tools.torture.outcome import Outcome
from tools.torture.prompts import Bench, disk_tiers, prompt, quiet

PROMPTS = 40
CALL_TIMEOUT_S = 60.0

Part: TypeAlias = tuple[Chunk, torch.Tensor]


class Flips:
    """An engine with a few stored prompts, whose records are damaged one by one."""

    def __init__(self, bench: Bench, engine: CacheEngine, path: Path, outcome: Outcome, seed: int) -> None:
        self._bench = bench
        self._engine = engine
        self._path = path
        self._outcome = outcome
        self._random = random.Random(seed)
        self._prompts: list[list[int]] = [prompt(number) for number in range(PROMPTS)]
        self._parts: list[list[Part]] = [bench.with_content(tokens) for tokens in self._prompts]

    async def store(self, index: int) -> None:
        """Store the missing chunks of the prompt."""
        tokens = self._prompts[index]
        self._bench.rig.write(range(len(tokens)), self._bench.rig.content(tokens))
        await self._engine.store(tokens, range(len(tokens)))
        await self._engine.clear(memory_only=True)

    async def damage_one(self) -> None:
        """Damage one record of a random prompt and load the prompt. Missing chunks are stored before the next damage."""
        index = self._random.randrange(PROMPTS)
        parts = self._parts[index]
        await self.store(index)
        chunk = self._random.randrange(len(parts))
        record = self._record(parts[chunk][0])
        if not record.exists():  # an earlier damage; the tier detects it by reading
            await self._bench.load(self._engine, parts)
            await self.store(index)
        others = [path for path in self._path.glob("??/*") if path != record]
        damage = self._random.choice(DAMAGES)
        if self._random.random() < 0.1:  # damage while the record is read
            call = asyncio.ensure_future(self._bench.load(self._engine, parts))
            hit = await asyncio.to_thread(self._strike, damage, record, others)
            served, wrong = await call
            note = ": read before the damage"
        else:
            hit = self._strike(damage, record, others)
            served, wrong = await self._bench.load(self._engine, parts)
            note = ""
        self._judge(damage.__name__ if hit else "none: it was removed before", served > chunk, wrong, note)
        await self._engine.clear(memory_only=True)

    def _strike(self, damage: Damage, record: Path, others: list[Path]) -> bool:
        """Damage the record; False if the tier has already removed it because of an earlier damage."""
        try:
            damage(record, others, self._random)
        except FileNotFoundError:
            return False
        return True

    def _judge(self, damage: str, served: bool, wrong: int, note: str) -> None:
        outcome = self._outcome
        outcome.add("damages")
        outcome.add(f"damage.{damage}")
        outcome.expect(wrong == 0, f"damage {outcome.counts['damages']}, {damage}: {wrong} wrong slots")
        # Served nevertheless: read before the damage, or only padding or no byte has changed.
        outcome.add(f"served nevertheless{note}" if served else "misses")

    def _record(self, chunk: Chunk) -> Path:
        name = chunk.key.hex()
        return self._path / name[:2] / name


async def _campaign(damages: int, seconds: float, seed: int, path: Path, outcome: Outcome) -> None:
    bench = Bench()
    async with bench.rig.open(registry=bench.registry, tiers=disk_tiers(path, 1 << 30)) as engine:
        flips = Flips(bench, engine, path, outcome, seed)
        for index in range(PROMPTS):
            await flips.store(index)
        while outcome.left("damages", damages, seconds):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await flips.damage_one()
        found = engine.statistics()
        for name, count in found.counts.items():
            if "corrupt" in name or "error" in name:
                outcome.counts[name] = count
        outcome.counts["found by the tier itself"] = found.tiers["disk"].corrupt
        outcome.expect(
            found.arena.leased_slabs == found.tiers["cpu"].chunks, f"leases are lost: {found.arena}"
        )


def run(*, damages: int, seconds: float, seed: int) -> Outcome:
    """Damage `damages` records, or run for `seconds` if not 0."""
    outcome = Outcome("flips", {"damages": 0, "misses": 0, "seed": seed})
    path = Path(tempfile.mkdtemp(prefix="lmcache-async-flips-"))
    gc.disable()  # a slab that only a garbage collection would return counts as lost
    try:
        with quiet():
            uvloop.run(_campaign(damages, seconds, seed, path, outcome))
    finally:
        gc.enable()
        shutil.rmtree(path)
    return outcome.end()
