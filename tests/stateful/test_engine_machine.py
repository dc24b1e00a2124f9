"""The engine against a model: whatever happens, a hit is what was stored, and it is a prefix."""

import asyncio
import gc
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_async.hashing import RequestNamespace
from lmcache_async.testing.rig import Rig

NAMESPACES = (RequestNamespace(), RequestNamespace(cache_salt="tenant"))

# Few tokens and short prompts, so that prompts share prefixes and chunks often.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=36)
namespaces = st.sampled_from(range(len(NAMESPACES)))


class EngineMachine(RuleBasedStateMachine):
    """Stores, retrieves, evictions, restarts and cancellations over memory and disk."""

    loop_factory = staticmethod(asyncio.new_event_loop)

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)
        self.path = Path(tempfile.mkdtemp(prefix="lmcache-async-test-"))
        self.rig = Rig(blocks=24, slabs=6)
        self.stored: list[set[tuple[int, ...]]] = [set() for _ in NAMESPACES]
        self.exit = AsyncExitStack()
        self.engine = None

    def run(self, coroutine):
        return self.runner.run(coroutine)

    @initialize(disk_slabs=st.integers(1, 12))
    def start(self, disk_slabs):
        self.disk_bytes = disk_slabs * self.rig.slab_bytes
        self.run(self._open())

    async def _open(self):
        tiers = ["cpu", {"name": "disk", "path": str(self.path), "max_bytes": self.disk_bytes}]
        self.engine = await self.exit.enter_async_context(
            self.rig.open(tiers=tiers, **{"retrieve.verify_arena": True})
        )

    @rule(tokens=prompts, namespace=namespaces)
    def store(self, tokens, namespace):
        self.rig.write(range(len(tokens)), self.content(tokens, namespace))
        self.stored[namespace].add(tuple(tokens))
        self.run(self.engine.store(tokens, range(len(tokens)), namespace=NAMESPACES[namespace]))

    @rule(tokens=prompts, namespace=namespaces, skip=st.integers(0, 10))
    def retrieve(self, tokens, namespace, skip):
        skip = min(skip, len(tokens))
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:skip] = False
        self.rig.wipe()
        slots = list(range(self.rig.num_slots - len(tokens), self.rig.num_slots))

        result = self.run(
            self.engine.retrieve(tokens, slots, mask=mask, namespace=NAMESPACES[namespace])
        ).tolist()

        hit = [i for i, there in enumerate(result) if there]
        assert hit == list(range(skip, skip + len(hit))), "the mask is not of the form F* T* F*"
        assert skip + len(hit) <= max(skip, self.longest(tokens, namespace))
        expected = self.content(tokens, namespace)[:, :, hit]
        assert torch.equal(self.rig.read([slots[i] for i in hit]), expected)
        others = sorted(set(range(self.rig.num_slots)) - {slots[i] for i in hit})
        assert (self.rig.read(others) == -7.0).all(), "a slot outside the hit was touched"

    @rule(tokens=prompts, namespace=namespaces)
    def lookup(self, tokens, namespace):
        found = self.run(self.engine.lookup(tokens, namespace=NAMESPACES[namespace]))

        assert found <= self.longest(tokens, namespace)

    @rule(tokens=prompts, namespace=namespaces, steps=st.integers(0, 40), store=st.booleans())
    def cancel(self, tokens, namespace, steps, store):
        if store:
            self.rig.write(range(len(tokens)), self.content(tokens, namespace))
            self.stored[namespace].add(tuple(tokens))
        verb = self.engine.store if store else self.engine.retrieve

        async def cancelled():
            task = asyncio.ensure_future(verb(tokens, range(len(tokens)), namespace=NAMESPACES[namespace]))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            while self.engine.statistics().late_calls:
                await asyncio.sleep(0)

        self.run(cancelled())

    @rule(which=st.integers(0, 100), tier=st.integers(0, 1))
    def evict(self, which, tier):
        async def remove_one():
            chosen = self.engine._parts.stack.tiers[tier].tier
            keys = sorted([key async for key in chosen.keys()])  # noqa: SIM118  (a tier is no dict)
            if keys:
                await chosen.remove(keys[which % len(keys)])

        self.run(self.engine.flush(timeout_s=5))
        self.run(remove_one())

    @rule(memory_only=st.booleans())
    def clear(self, memory_only):
        self.run(self.engine.clear(memory_only=memory_only))
        if not memory_only:
            self.stored = [set() for _ in NAMESPACES]

    @rule()
    def restart(self):
        self.run(self.exit.aclose())
        self.run(self._open())

    @precondition(lambda self: self.engine is not None)
    @invariant()
    def leases_are_back_and_capacity_holds(self):
        assert self.run(self.engine.flush(timeout_s=5))
        statistics = self.engine.statistics()
        if statistics.arena.lingering_slabs:
            gc.collect()  # a cancelled call's traceback may still know its buffers' arrays
            statistics = self.engine.statistics()
        assert statistics.running == 0
        assert statistics.arena.leased_slabs == statistics.tiers["cpu"].chunks
        assert statistics.tiers["disk"].bytes <= self.disk_bytes

    def teardown(self):
        try:
            self.run(self.exit.aclose())
        finally:
            self.runner.close()
            shutil.rmtree(self.path)

    def longest(self, tokens, namespace):
        """The longest prefix that can be there: whole chunks of some stored prompt, or one of its tails."""
        best, size = 0, self.rig.chunk_size
        for stored in self.stored[namespace]:
            common = 0
            while common < min(len(stored), len(tokens)) and stored[common] == tokens[common]:
                common += 1
            whole = common - common % size
            tail_too = common == len(stored) and (common == len(tokens) or common % size == 0)
            best = max(best, common if tail_too else whole)
        return best

    def content(self, tokens, namespace):
        return self.rig.content([token + 2 * namespace + 1 for token in tokens])


class UvloopEngineMachine(EngineMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)


@pytest.mark.parametrize("machine", [EngineMachine, UvloopEngineMachine])
def test_engine_machine(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
