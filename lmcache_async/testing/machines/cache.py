"""State machine for an engine with faulty tiers. Hits are compared with the stored prompts."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import RequestNamespace
from lmcache_async.registry import Registry
from lmcache_async.testing.fakes import Fault, FaultKind, FaultPlan, FaultyRegistry, installed
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import cancelled_at_await
from lmcache_async.testing.strategies import fault_plans, token_streams
from lmcache_async.types import StoreReport


class Prompts:
    """The prompts of one namespace, as tuples of token ids.

    Attributes:
        possible: Prompts whose store was started. Only these may be found.
        certain: Prompts that are stored and must be found.
    """

    def __init__(self, chunk_size: int) -> None:
        self.possible: set[tuple[int, ...]] = set()
        self.certain: set[tuple[int, ...]] = set()
        self._chunk_size = chunk_size

    def longest(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix that may be found."""
        return self._longest(tokens, self.possible)

    def shortest(self, tokens: Sequence[int]) -> int:
        """Return the length of the prefix that must be found. A shorter hit means that chunks were lost."""
        return self._longest(tokens, self.certain)

    def forget(self) -> None:
        self.possible.clear()
        self.certain.clear()

    def _longest(self, tokens: Sequence[int], prompts: Iterable[tuple[int, ...]]) -> int:
        """Return the longest match in whole chunks. The partial last chunk of a prompt counts if `tokens` end with it."""
        best, size = 0, self._chunk_size
        for prompt in prompts:
            common = 0
            while common < min(len(prompt), len(tokens)) and prompt[common] == tokens[common]:
                common += 1
            whole = common - common % size
            tail_too = common == len(prompt) and (common == len(tokens) or common % size == 0)
            best = max(best, common if tail_too else whole)
        return best


async def check_idle(engine: CacheEngine) -> None:
    """Assert that nothing is pending, only tiers and pins hold leases, and no tier exceeds its capacity."""
    assert await engine.flush(timeout_s=30), "calls or writes do not end"
    statistics = engine.statistics()
    if statistics.arena.lingering_slabs:
        gc.collect()  # the traceback of a cancelled call may refer to its buffers' arrays
        statistics = engine.statistics()
    assert (statistics.running, statistics.late_calls) == (0, 0)
    kept = sum(statistics.tiers[tier].chunks for tier in statistics.in_arena)
    leased = statistics.arena.leased_slabs
    assert kept <= leased <= kept + statistics.pinned_chunks, f"{leased} leases, {kept} chunks"
    for name, writer in statistics.writers.items():
        assert (writer.queued_chunks, writer.queued_bytes) == (0, 0), f"writes of {name} are queued"
    for name, tier in statistics.tiers.items():
        assert tier.max_bytes is None or tier.bytes <= tier.max_bytes, f"{name} exceeds its max_bytes"


T = TypeVar("T")

SPACES = (RequestNamespace(), RequestNamespace(cache_salt="tenant"))
PROMPTS = token_streams(max_size=36)
SPACE = st.sampled_from(range(len(SPACES)))
SOME = st.lists(st.tuples(PROMPTS, SPACE), min_size=1, max_size=3)


class CacheMachine(RuleBasedStateMachine):
    """Stores and retrieves of two tenants, with faults, evictions, restarts and cancellations.

    It runs the bundled tiers `cpu` and `disk`, or `disk` alone. Subclass it and override `make_tiers` to test
    others:

    ```python
    class MyMachine(CacheMachine):
        def make_tiers(self, directory, max_bytes):
            return ["cpu", {"name": "mine", "path": str(directory / "kv")}]

    TestMyMachine = MyMachine.TestCase
    ```

    Checked properties:

    - The slots of every token that a retrieve reports hold the KV that was stored for these tokens in this
      namespace. No other slot is changed.
    - A mask is True for at most one run of tokens.
    - No hit is longer than the longest prefix of the prompt that was ever stored in its own namespace.
    - Stored chunks are found, unless a tier is full or failed, or chunks were evicted.
    - A hit is never longer after an eviction.
    - No tier exceeds its capacity.
    - A call that is cancelled at any await ends. After every call, only tiers and pins hold leases, every
      queue is empty, and nothing runs.

    Attributes:
        loop_factory: Makes the event loop; `staticmethod(uvloop.new_event_loop)` in a subclass.
        settings: Settings of the config other than the tiers; dotted keys.
    """

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)
    settings: ClassVar[dict[str, Any]] = {"retrieve.verify_arena": True}

    def make_tiers(self, directory: Path, max_bytes: int) -> Sequence[object]:
        """Return the setting `tiers` of the config, fastest first. Half of the runs leave out `"cpu"`.

        Args:
            directory: Directory of the run, empty at first. It is the same after a restart.
            max_bytes: Capacity of tiers that have one. It is not reached in half of the runs.
        """
        return ["cpu", {"name": "disk", "path": str(directory / "kv"), "max_bytes": max_bytes}]

    def make_registry(self) -> Registry:
        """Return the registry of the tiers: the installed plug-ins. A FakeRegistry offers other classes."""
        return installed()

    @initialize(slabs=st.none() | st.integers(1, 12), memory=st.booleans())
    def start(self, slabs: int | None, memory: bool) -> None:
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)
        self.directory = Path(tempfile.mkdtemp(prefix="lmcache-async-test-"))
        self.rig = Rig(blocks=24, slabs=6)
        self.roomy = slabs is None
        self.memory = memory
        self.max_bytes = (1000 if slabs is None else slabs) * self.rig.slab_bytes
        self.written = False
        self.prompts = [Prompts(self.rig.chunk_size) for _ in SPACES]
        self.registry = FaultyRegistry(self.make_registry())
        self.exit = AsyncExitStack()
        self.run(self.open())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call on the machine's loop and return its result."""
        return self.runner.run(call)

    async def open(self) -> None:
        self.registry.made.clear()
        self.lossless = self.roomy
        tiers = list(self.make_tiers(self.directory, self.max_bytes))
        if not self.memory:
            tiers = [tier for tier in tiers if tier != "cpu"]
        self.engine: CacheEngine = await self.exit.enter_async_context(
            self.rig.open(registry=self.registry, **{"tiers": tiers, **self.settings})
        )

    @rule(some=SOME)
    def store(self, some: list[tuple[list[int], int]]) -> None:
        self.written = True
        for tokens, space in some:
            self.run(self._store(tokens, space))

    @rule(some=SOME, skip=st.just(0) | st.integers(0, 10))
    def retrieve(self, some: list[tuple[list[int], int]], skip: int) -> None:
        for tokens, space in some:
            self.run(self._retrieve(tokens, space, min(skip, len(tokens))))

    @precondition(lambda self: self.written)
    @rule(
        which=st.integers(0, 999),
        damage=st.sampled_from(["none", "flip", "flip", "cut"]),
        position=st.integers(-99, -1) | st.integers(0, 9999),
    )
    def retrieve_again(self, which: int, damage: FaultKind | Literal["none"], position: int) -> None:
        """Retrieve a stored prompt, perhaps from damaged records. Draws must not depend on thread timing."""
        asked = [
            (space, prompt)
            for space, prompts in enumerate(self.prompts)
            for prompt in prompts.certain or prompts.possible
        ]
        if not asked:
            return
        space, prompt = sorted(asked)[which % len(asked)]
        if damage != "none" and self._is_persistent():
            self.run(self.engine.clear(memory_only=True))  # so that it is read from a faulty tier
            for faulty in self.registry.made:
                faulty.faults.clear()
            self.fail(FaultPlan((Fault(damage, position=position),) * 3), 0)
        self.run(self._retrieve([*prompt], space, 0))

    @rule(tokens=PROMPTS, other=PROMPTS, space=SPACE, other_space=SPACE)
    def store_and_retrieve(self, tokens: list[int], other: list[int], space: int, other_space: int) -> None:
        async def both() -> None:
            self.prompts[space].possible.add(tuple(tokens))
            await asyncio.gather(self._store(tokens, space), self._retrieve(other, other_space, 0))

        self.run(both())

    @rule(tokens=PROMPTS, space=SPACE)
    def lookup(self, tokens: list[int], space: int) -> None:
        self.run(self._lookup(tokens, space))

    @rule(tokens=PROMPTS, space=SPACE, lookup_id=st.sampled_from(["a", "b"]), unpin=st.booleans())
    def pin(self, tokens: list[int], space: int, lookup_id: str, unpin: bool) -> None:
        if unpin:
            self.engine.unpin(lookup_id)
        else:
            self.run(self.engine.lookup(tokens, namespace=SPACES[space], lookup_id=lookup_id))

    @rule(tokens=PROMPTS, space=SPACE)
    def prefetch(self, tokens: list[int], space: int) -> None:
        fetched = self.run(self.engine.prefetch(tokens, namespace=SPACES[space]))
        assert fetched <= self.prompts[space].longest(tokens), "a prefetch is longer than the stored prompts"

    @rule(
        tokens=PROMPTS,
        space=SPACE,
        verb=st.sampled_from(["store", "retrieve", "lookup", "prefetch"]),
        awaits=st.integers(0, 60),
    )
    def cancel(self, tokens: list[int], space: int, verb: str, awaits: int) -> None:
        async def cancelled() -> None:
            rows = range(len(tokens))
            calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
                "store": lambda: self.engine.store(tokens, rows, namespace=SPACES[space]),
                "retrieve": lambda: self.engine.retrieve(tokens, rows, namespace=SPACES[space]),
                "lookup": lambda: self.engine.lookup(tokens, namespace=SPACES[space]),
                "prefetch": lambda: self.engine.prefetch(tokens, namespace=SPACES[space]),
            }
            if verb == "store":
                self._compute(tokens, space)
            await cancelled_at_await(calls[verb](), awaits)

        self.run(cancelled())

    @rule(tokens=PROMPTS, space=SPACE, which=st.integers(0, 100), tier=st.integers(0, 3))
    def evict(self, tokens: list[int], space: int, which: int, tier: int) -> None:
        self.run(self._evict(tokens, space, which, tier))

    @rule(what=st.sampled_from(["restart", "forget memory", "forget memory", "forget"]))
    def begin_again(self, what: str) -> None:
        forget = what == "forget" or not self._is_persistent()
        if what == "restart":
            self.run(self.exit.aclose())
            self.run(self.open())
        else:
            self.run(self.engine.clear(memory_only=what == "forget memory"))
        if forget:
            for prompts in self.prompts:
                prompts.forget()

    @rule(plan=fault_plans(), tier=st.integers(0, 3))
    def fail(self, plan: FaultPlan, tier: int) -> None:
        if not self.registry.made:
            return
        self.registry.made[tier % len(self.registry.made)].faults.extend(plan.faults)
        if any(plan.faults):
            self._allow_losses()

    @invariant()
    def nothing_is_left_behind(self) -> None:
        if hasattr(self, "engine"):
            self.run(check_idle(self.engine))

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            self.run(self.exit.aclose())
        finally:
            self.runner.close()
            shutil.rmtree(self.directory)

    async def _store(self, tokens: list[int], space: int) -> StoreReport:
        self._compute(tokens, space)
        report = await self.engine.store(tokens, range(len(tokens)), namespace=SPACES[space])
        flushed = await self.engine.flush(timeout_s=30)
        assert flushed, "a flush did not end"
        self._note_failures()
        if self.lossless and not report.dropped:
            self.prompts[space].certain.add(tuple(tokens))
        return report

    async def _retrieve(self, tokens: list[int], space: int, skip: int) -> None:
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:skip] = False
        slots = list(range(self.rig.num_slots - len(tokens), self.rig.num_slots))
        others = list(range(self.rig.num_slots - len(tokens)))  # a store may be reading the first of them
        before = self.rig.read(others)
        self.rig.write(slots, torch.full_like(self.rig.read(slots), -7.0))

        got = await self.engine.retrieve(tokens, slots, mask=mask, namespace=SPACES[space])

        hit = [position for position, there in enumerate(got.tolist()) if there]
        assert hit == list(range(skip, skip + len(hit))), (
            f"the mask {got.tolist()} is not True for one run of tokens"
        )
        assert skip + len(hit) <= max(skip, self.prompts[space].longest(tokens)), "a hit of unstored tokens"
        expected = self._content(tokens, space)[:, :, hit]
        assert torch.equal(self.rig.read([slots[position] for position in hit]), expected), "wrong bytes"
        missed = sorted(set(slots) - {slots[position] for position in hit})
        assert (self.rig.read(missed) == -7.0).all(), "a slot outside the hit was written"
        assert torch.equal(self.rig.read(others), before), "a slot of another call was written"

    async def _lookup(self, tokens: list[int], space: int) -> int:
        lies = any(faulty.faults for faulty in self.registry.made)
        found = await self.engine.lookup(tokens, namespace=SPACES[space])
        assert lies or found <= self.prompts[space].longest(tokens), "a lookup found more than was stored"
        self._note_failures()
        if self.lossless:
            assert found >= self.prompts[space].shortest(tokens), "a stored prompt is not found"
        return found

    async def _evict(self, tokens: list[int], space: int, which: int, tier: int) -> None:
        await self.engine.flush(timeout_s=30)
        for faulty in self.registry.made:
            faulty.faults.clear()  # otherwise the two lookups may differ
        before = await self._lookup(tokens, space)
        tiers = self.engine._parts.stack.tiers
        chosen = tiers[tier % len(tiers)].tier
        keys = sorted([key async for key in chosen.keys()])  # noqa: SIM118 - no dict
        if keys and await chosen.remove(keys[which % len(keys)]):
            for prompts in self.prompts:
                prompts.certain.clear()
        after = await self._lookup(tokens, space)
        assert after <= before or not self.lossless, "a hit is longer after an eviction"

    def _compute(self, tokens: list[int], space: int) -> None:
        """Write the KV of the prompt into the slots from 0, and allow it to be found from now on."""
        self.rig.write(range(len(tokens)), self._content(tokens, space))
        self.prompts[space].possible.add(tuple(tokens))

    def _content(self, tokens: list[int], space: int) -> torch.Tensor:
        return self.rig.content([token + 2 * space + 1 for token in tokens])

    def _note_failures(self) -> None:
        """Stop expecting hits if a tier reported an error or a drop, such as a timeout on a slow machine."""
        counts = self.engine.statistics().counts
        if any(event in name for name in counts for event in (".errors.", ".dropped.")):
            self._allow_losses()

    def _allow_losses(self) -> None:
        self.lossless = False
        for prompts in self.prompts:
            prompts.certain.clear()

    def _is_persistent(self) -> bool:
        return any(stacked.tier.capabilities.persistent for stacked in self.engine._parts.stack.tiers)
