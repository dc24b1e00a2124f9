"""Synthetic conversations that use an engine as vLLM does: look up, decide, load, compute, store.

No model runs: computing is a sleep, and the KV is noise. The engine and its tiers are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import ChunkHasher, as_tokens
from lmcache_async.integration.vllm.load_policy import Hit, LoadPolicy, PrefillClock
from lmcache_async.testing.rig import Rig
from lmcache_async.types import RequestPlan

CHUNK = 256
MAX_TOKENS = 4096
WORKERS = 3
TOKENS_PER_S = 8000.0
"""Assumed prefill speed of the model."""
SYSTEM = 1024
"""Tokens of the common system prompt."""
SESSIONS = 8


@contextlib.asynccontextmanager
async def open_engine(directory: Path) -> AsyncIterator[tuple[CacheEngine, Rig]]:
    """Open an engine with host memory, a disk, a failing disk, and a status page."""
    rig = Rig(
        layers=8,
        blocks=WORKERS * MAX_TOKENS // 16,
        block_size=16,
        heads=8,
        head_dim=64,
        chunk_size=CHUNK,
        slabs=56,
        model="demo-llama-8b",
    )
    for keys, values in rig.tensors:
        torch.nn.init.normal_(keys)
        torch.nn.init.normal_(values)
    failing = [
        "metrics",
        {"name": "breaker", "min_calls": 2, "pause_s": 20},
        "deadline",
        {"name": "faults", "put": {"error": 0.9}},
    ]
    tiers = [
        "cpu",
        {"name": "disk", "path": str(directory / "disk"), "max_bytes": "2GiB"},
        {
            "name": "disk",
            "id": "archive",
            "path": str(directory / "archive"),
            "max_bytes": "8GiB",
            "layers": failing,
        },
    ]
    async with rig.open(**{"tiers": tiers, "http.listen": "127.0.0.1:0"}) as engine:
        yield engine, rig


class Traffic:
    """Sends requests until it is cancelled."""

    def __init__(self, engine: CacheEngine, rig: Rig) -> None:
        self._engine = engine
        self._rig = rig
        self._dice = random.Random(7)
        self._decider = LoadPolicy(PrefillClock(time.monotonic, TOKENS_PER_S), CHUNK)
        self._system = self._tokens(SYSTEM)
        self._sessions = [self._new_session() for _ in range(SESSIONS)]
        self._asked = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                group.create_task(self._work(worker))

    async def _work(self, worker: int) -> None:
        slots = list(range(worker * MAX_TOKENS, (worker + 1) * MAX_TOKENS))
        while True:
            at = self._dice.randrange(SESSIONS)
            tokens = self._sessions[at] + self._tokens(self._dice.randrange(60, 700))
            await self._ask(tokens, slots)
            full = len(tokens) > MAX_TOKENS - 800
            self._sessions[at] = self._new_session() if full else tokens
            await asyncio.sleep(self._dice.uniform(0.1, 1.2))

    async def _ask(self, tokens: list[int], slots: list[int]) -> None:
        self._asked += 1
        name = f"chatcmpl-{self._dice.getrandbits(48):012x}"
        local = SYSTEM // CHUNK * CHUNK if self._asked > SESSIONS and self._dice.random() < 0.4 else 0
        plan = await self._plan(name, tokens, local)
        self._engine.planned(plan)
        end = local + plan.load_tokens
        if plan.load_tokens:
            wanted = torch.arange(end) >= local
            await self._engine.retrieve(tokens[:end], slots[:end], mask=wanted, request_id=name)
        await asyncio.sleep((len(tokens) - end) / TOKENS_PER_S)
        await self._engine.store(tokens, slots[: len(tokens)], request_id=name)

    async def _plan(self, name: str, tokens: list[int], local: int) -> RequestPlan:
        hasher = ChunkHasher(self._engine.namespace.root(), chunk_size=CHUNK, algorithm="xxh3_128")
        chunks = hasher.extend(as_tokens(tokens[: len(tokens) - 1]))
        found = await self._engine.lookup_keys([chunk.key for chunk in chunks])
        hit = Hit(found.costs, found.count * CHUNK, local, len(tokens))
        verdict = self._decider.decide(name, hit)
        return RequestPlan(
            request_id=name,
            prompt_tokens=len(tokens),
            local_tokens=local,
            hit_tokens=hit.tokens,
            load_tokens=max(0, verdict.tokens - local),
            decided=verdict.decided,
            why=verdict.why,
        )

    def _new_session(self) -> list[int]:
        return self._system + self._tokens(self._dice.randrange(200, 1500))

    def _tokens(self, number: int) -> list[int]:
        return [self._dice.randrange(32000) for _ in range(number)]
