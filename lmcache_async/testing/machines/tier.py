"""State machine for a tier. Every result is compared with a dict."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance.base import TierRig, are_answers, release_all
from lmcache_async.testing.conformance.concurrency import VERBS, WRITES
from lmcache_async.testing.conformance.content import EDITS
from lmcache_async.testing.records import SLAB_BYTES, check_record, is_proven, key_of, small_arena
from lmcache_async.testing.steps import cancelled_at_await, turns
from lmcache_async.tiers.base import Tier, TierStatistics
from lmcache_async.types import ChunkKey


class TierModel:
    """Lower and upper bound of the set of stored chunks, by number.

    Attributes:
        possible: Chunks that may be stored. No other chunk is.
        certain: Chunks that must be stored, unless the tier counts them as evicted.
        damaged: Chunks damaged in the backend. They are misses or fail verification.
        late: Chunks that an interrupted call may still put or remove at any later time.
    """

    def __init__(self, lengths: Sequence[int], *, reliable: bool) -> None:
        self.possible: set[int] = set()
        self.certain: set[int] = set()
        self.damaged: set[int] = set()
        self.late: set[int] = set()
        self._lengths = lengths
        self._reliable = reliable
        self._evictions = 0

    def opened(self, statistics: TierStatistics) -> None:
        self._evictions = statistics.evictions

    def put(self, numbers: Sequence[int], answers: Sequence[TierError | None]) -> None:
        self.possible.update(numbers)
        for number, answer in zip(numbers, answers, strict=True):
            if answer is None and self._reliable and number not in self.damaged | self.late:
                self.certain.add(number)
            else:
                self.certain.discard(number)

    def unsure(self, numbers: Collection[int], *, possible: Iterable[int], late: bool = False) -> None:
        """Record overlapping or interrupted calls on `numbers`; `possible` of these may be stored afterwards.

        With `late`, a call may still take effect at any later time.
        """
        self.certain.difference_update(numbers)
        self.possible.update(possible)
        if late:
            self.late.update(numbers)

    def check(self, number: int, found: bool, answer: str) -> None:
        """Check that the chunk was found only if it may be stored, and always if it must be; `answer` is for messages."""
        assert found or number not in self.certain, f"chunk {number} is stored, but {answer}"
        assert not found or number in self.possible, f"chunk {number} is not stored, but {answer}"

    def removed(self, number: int, was_there: bool) -> None:
        if self._reliable:
            self.check(number, was_there, f"remove returned {was_there}")
        self._gone(number)

    def cleared(self, count: int) -> None:
        if self._reliable:
            assert len(self.certain) <= count <= len(self.possible), f"clear returned {count}"
        self.forget_all()

    def forget_all(self) -> None:
        for number in tuple(self.possible):
            self._gone(number)

    def damaged_one(self, number: int) -> None:
        self.certain.discard(number)
        self.damaged.add(number)

    def check_got(self, numbers: Sequence[int], answers: Sequence[Buffer | TierError | None]) -> set[int]:
        """Check the results of `get`. Return the numbers whose records fail verification."""
        wrong = set()
        for number, answer in zip(numbers, answers, strict=True):
            self.check(number, isinstance(answer, Buffer), f"get returned {answer!r}")
            if not isinstance(answer, Buffer):
                continue
            if is_proven(answer, number):
                check_record(answer, number, self._lengths[number])
            else:
                assert number in self.damaged or not self._reliable, f"the bytes of chunk {number} are wrong"
                wrong.add(number)
        return wrong

    def check_found(self, numbers: Sequence[int], there: Sequence[bool], count: int, first: bool) -> None:
        """Check the results of `contains_many`, `count_prefix` and `contains`, called in this order."""
        assert len(there) == len(numbers)
        if not self._reliable:
            return
        for number, present in zip(numbers, there, strict=True):
            self.check(number, present, f"contains_many returned {present}")
        assert count == [*there, False].index(False), f"count_prefix returned {count}, contains_many {there}"
        assert first == there[0], "contains and contains_many do not agree"

    def check_held(self, statistics: TierStatistics, keys: set[ChunkKey] | None) -> None:
        """Check the statistics and the listed keys, and take evicted chunks out of the sets."""
        if statistics.max_bytes is not None:
            assert statistics.bytes <= statistics.max_bytes, "the stored bytes exceed max_bytes"
        evicted, self._evictions = statistics.evictions - self._evictions, statistics.evictions
        assert evicted == 0 or statistics.max_bytes is not None, "evicted without a limit"
        if keys is None:
            if evicted:
                self.certain.clear()
            return
        held = {number for number in range(len(self._lengths)) if key_of(number) in keys}
        assert len(held) == len(keys), "the tier has keys that were never put"
        assert statistics.chunks in {0, len(held)}, f"{statistics.chunks} are counted, {len(held)} listed"
        if self._reliable:
            assert held <= self.possible, f"chunks {held - self.possible} are listed, but not stored"
            lost = self.certain - held
            assert len(lost) <= evicted, f"chunks {lost} are lost, {evicted} were evicted"
            for number in self.possible - held:
                self._gone(number)
            self.certain = held - self.damaged - self.late

    def _gone(self, number: int) -> None:
        if number not in self.late:
            self.possible.discard(number)
        self.certain.discard(number)
        self.damaged.discard(number)


T = TypeVar("T")

NUMBERS = st.integers(0, 9)
SOME = st.lists(NUMBERS, min_size=1, max_size=6, unique=True)
LENGTHS = (0, 1, 4095, 4096, 4097, 9000, 20_000, 30_000, 50_000, 64 * 1024)
"""Payload bytes by number. The record of a chunk always has the same content."""


class TierMachine(RuleBasedStateMachine):
    """Random calls on a tier, some concurrent, some cancelled, with restarts, damage and a capacity.

    Subclass it, override `make_tier` (and `damage_content`, to include damaged records), and expose its test case:

    ```python
    class MyMachine(TierMachine):
        def make_tier(self, directory, max_bytes):
            return MyTier(MyConfig(path=directory))

    TestMyMachine = MyMachine.TestCase
    ```

    Checked properties:

    - A record that is read is the one that was put under that key, byte for byte. A damaged one fails
      verification.
    - A chunk that was never put, or that was removed, is a miss.
    - A chunk that was put is stored, also after a restart of a persistent tier, unless the tier counts an
      eviction for it, or the put failed, was cancelled or overlapped a removal.
    - `contains`, `count_prefix`, `get`, `keys`, `remove` and `statistics` agree with each other, also after cancelled
      calls.
    - The stored bytes never exceed `max_bytes`, and a tier without a limit evicts nothing.
    - After each call, also a cancelled one, every lease is released and no free memory is read.
    - A cancelled call ends.

    Attributes:
        loop_factory: Makes the event loop; `staticmethod(uvloop.new_event_loop)` in a subclass.
        reliable: False for a tier that loses or damages chunks by design. Records that pass verification must
            still be right, and limits and leases are still checked.
        late_effects: True for a tier over a network: a request sent by a cancelled call may be processed
            after one that a later call sent on another connection.
    """

    loop_factory: Callable[[], asyncio.AbstractEventLoop] = staticmethod(asyncio.new_event_loop)
    reliable: ClassVar[bool] = True
    late_effects: ClassVar[bool] = False

    def make_tier(self, directory: Path, max_bytes: int | None) -> Tier:
        """Return a tier, neither bound nor opened. Must be overridden.

        Args:
            directory: Directory for this tier alone, empty at first. It is the same after a restart.
            max_bytes: Capacity for tiers that have one; None for no limit.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make_tier(directory, max_bytes)")

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        """Replace the stored record of `key` with the result of `edit`. Return whether it was replaced.

        The default returns False, and the rule for damage has no effect.
        """
        del key, edit
        return False

    @initialize(max_slabs=st.none() | st.integers(2, 8))
    def start(self, max_slabs: int | None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lmcache-async-test-"))
        self.max_bytes = None if max_slabs is None else max_slabs * SLAB_BYTES
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)
        self.arena = small_arena(24)
        self.model = TierModel(LENGTHS, reliable=self.reliable)
        self.written = False
        self.run(self.open())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call on the machine's loop and return its result."""
        return self.runner.run(call)

    async def open(self) -> None:
        self.tier = self.make_tier(self.directory, self.max_bytes)
        self.rig = TierRig(self.tier, self.arena, LENGTHS.__getitem__, readonly=False)
        self.tier.bind(self.arena)
        await self.tier.__aenter__()
        self.model.opened(self.tier.statistics())

    async def close(self) -> None:
        await self.tier.__aexit__(None, None, None)
        leased = self.arena.statistics().leased_slabs
        assert leased == 0, f"{leased} leases are left after the tier was closed"

    @rule(numbers=SOME)
    def put_some(self, numbers: list[int]) -> None:
        self.written = True
        self.run(self._put(numbers))

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6), alone=st.booleans())
    def get_some(self, numbers: list[int], alone: bool) -> None:
        self.run(self._find_and_get(numbers[:1] if alone else numbers, alone=alone))

    @rule(numbers=SOME)
    def look(self, numbers: list[int]) -> None:
        async def ask() -> tuple[list[bool], int, bool]:
            keys = [key_of(number) for number in numbers]
            there = await self.tier.contains_many(keys)
            return there, await self.tier.count_prefix(keys), await self.tier.contains(keys[0])

        try:
            there, count, first = self.run(ask())
        except TierError:
            assert not self.reliable
            return
        self.model.check_found(numbers, there, count, first)

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        removed = self.run(self.rig.remove(number))
        assert self.tier.capabilities.removes or not removed
        if self.tier.capabilities.removes:
            self.model.removed(number, removed)

    @rule()
    def clear(self) -> None:
        if not (self.tier.capabilities.lists and self.tier.capabilities.removes):
            return
        count = self.run(self.tier.clear())
        self.model.cleared(count)

    @rule()
    def restart(self) -> None:
        persistent = self.tier.capabilities.persistent
        self.run(self.close())
        if not persistent:
            self.model.forget_all()
        self.run(self.open())

    @rule(puts=SOME, gets=SOME, removals=st.lists(NUMBERS, max_size=3, unique=True))
    def overlap(self, puts: list[int], gets: list[int], removals: list[int]) -> None:
        async def together() -> None:
            # The puts may evict chunks that are read.
            self.model.unsure({*puts, *removals, *gets}, possible=puts)
            await asyncio.gather(
                self._put(puts[:3], certain=False),
                self._get(gets),
                self._put(puts[3:], certain=False),
                *map(self.rig.remove, removals),
            )
            # A damaged record that was read is removed, and a put may have published it again.
            self.model.unsure((), possible=puts)

        self.run(together())

    @rule(
        verb=st.sampled_from(["put", "put_many", "get", "get_many", "remove", "contains_many"]),
        numbers=SOME,
        awaits=st.integers(0, 6) | st.integers(0, 25),
    )
    def cancel(self, verb: str, numbers: list[int], awaits: int) -> None:
        self.run(self._cancel(verb, numbers, awaits))

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, len(LENGTHS) - 1), edit=st.sampled_from(sorted(EDITS)))
    def damage(self, which: int, edit: str) -> None:
        # Draws and preconditions must not depend on thread timing.
        there = sorted(self.model.certain)
        if not there:
            return
        number = there[which % len(there)]
        if self.run(self.damage_content(key_of(number), EDITS[edit])):
            self.model.damaged_one(number)

    @invariant()
    def the_tier_is_sound(self) -> None:
        if hasattr(self, "tier"):
            self.run(self._check_sound())

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            self.run(self.close())
        finally:
            self.runner.close()
            self.arena.close()
            shutil.rmtree(self.directory)

    async def _check_sound(self) -> None:
        await self.rig.check_leases()
        self.rig.overwrite_free_memory()
        statistics = self.tier.statistics()
        keys = await self.rig.keys() if self.tier.capabilities.lists else None
        self.model.check_held(statistics, keys)

    async def _put(self, numbers: list[int], *, certain: bool = True) -> None:
        answers: Sequence[TierError | None]
        with self.rig.items(numbers) as items:
            try:
                answers = await self.tier.put_many(items)
            except TierError as error:  # an error of the whole batch
                answers = [error] * len(items)
            for number, (_, buffer) in zip(numbers, items, strict=True):
                check_record(buffer, number, LENGTHS[number])  # the caller's buffer is unchanged
        assert len(answers) == len(numbers)
        assert are_answers(answers)
        if certain:
            self.model.put(numbers, answers)

    async def _find_and_get(self, numbers: list[int], *, alone: bool) -> None:
        found = await self.rig.stored(numbers) if self.reliable else []
        may_miss = self.model.damaged | self.model.late
        missed = await self._get(numbers, alone=alone)
        vanished = missed.intersection(found) - may_miss
        assert not vanished, f"contains finds the chunks {vanished}, but get reports a miss"

    async def _get(self, numbers: list[int], *, alone: bool = False) -> set[int]:
        """Read the chunks and check the answers. Return the chunks that are missing."""
        answers: Sequence[Buffer | TierError | None]
        try:
            if alone:
                answers = [await self.tier.get(key_of(numbers[0]), self.rig.allocate)]
            else:
                answers = await self.rig.get_many(numbers)
        except TierError as error:
            answers = [error] * len(numbers)
        await self._take_answers(numbers, answers)
        return {number for number, answer in zip(numbers, answers, strict=True) if answer is None}

    async def _take_answers(self, numbers: list[int], answers: Sequence[Buffer | TierError | None]) -> None:
        try:
            wrong = self.model.check_got(numbers, answers)
        finally:
            release_all([*answers])
        for number in wrong:  # as the framework does with corrupt records
            self.model.removed(number, await self.rig.remove(number))

    async def _cancel(self, verb: str, numbers: list[int], awaits: int) -> None:
        if verb.startswith("get") and self.model.certain:
            numbers = sorted(self.model.certain)  # a miss has few awaits
        if not verb.endswith("many"):
            numbers = numbers[:1]
        if verb in {*WRITES, "remove"}:
            self.model.unsure(numbers, possible=numbers if verb in WRITES else (), late=self.late_effects)
        with self.rig.items(numbers) as items:
            task = await cancelled_at_await(VERBS[verb](self.tier, items, self.rig.allocate), awaits)
        self.rig.overwrite_free_memory()
        if verb.startswith("get") and not task.cancelled() and not isinstance(task.exception(), TierError):
            answers = task.result()
            await self._take_answers(numbers, answers if isinstance(answers, list) else [answers])
        await turns(5)  # let tasks of the cancelled call end
