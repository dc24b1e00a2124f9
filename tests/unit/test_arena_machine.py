"""The arena compared with a model: a set of used slabs and a queue of calls, with leases, cancellation and views."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import uvloop
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import PAGE, Buffer

SLABS = 5
FOREVER = 1e6


@dataclass(eq=False)
class Call:
    """A `lease_many` that waits, and the number of slabs that the model reserves for it."""

    wanted: int
    task: asyncio.Task[list[Buffer]]
    set_aside: int = 0


@dataclass(eq=False)
class Held:
    buffer: Buffer
    stamp: int  # content of the slab


@dataclass(eq=False)
class Kept:
    """A view that may outlive its lease."""

    address: int
    stamp: int
    view: memoryview | None


class ArenaMachine(RuleBasedStateMachine):
    new_loop: ClassVar[Any] = staticmethod(asyncio.new_event_loop)
    leases = Bundle("leases")
    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.loop = self.new_loop()
        self.arena = Arena(SLABS * PAGE, PAGE, prefault=False)
        self.line: list[Call] = []
        self.held: list[Held] = []
        self.kept: list[Kept] = []
        self.stamps = 0

    # The model.

    def used(self) -> int:
        addresses = {held.buffer.address for held in self.held} | {kept.address for kept in self.kept}
        return len(addresses) + sum(call.set_aside for call in self.line)

    def serve(self) -> list[Call]:
        """Serve calls from the front of the queue, each completely."""
        served = []
        while self.line:
            call = self.line[0]
            call.set_aside += min(call.wanted - call.set_aside, SLABS - self.used())
            if call.set_aside < call.wanted:
                break
            served.append(self.line.pop(0))
            self.turn()
            self.took(served[-1].task.result())
        return served

    def took(self, buffers: list[Buffer]) -> list[Held]:
        taken = []
        for buffer in buffers:
            self.stamps = (self.stamps + 1) % 251
            buffer.array[:] = self.stamps
            taken.append(Held(buffer, self.stamps))
        self.held += taken
        return taken

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def settle(self) -> Any:
        """Run due work of the arena and of the model, and add new leases to the bundle."""
        self.turn()
        before = len(self.held)
        for call in self.serve():
            assert call.task.done()
        return multiple(*self.held[before:])

    def end(self, held: Held) -> None:
        assert (held.buffer.array == held.stamp).all()  # no other lease has written there
        self.held.remove(held)
        held.buffer.release()

    # Rules.

    @rule(target=leases)
    def lease_nowait(self) -> Any:
        expected = not self.line and self.used() < SLABS
        buffer = self.arena.lease_nowait(PAGE)
        assert (buffer is not None) == expected
        return multiple(*self.took([buffer] if buffer else []))

    @rule(target=leases, wanted=st.integers(1, SLABS))
    def lease_many(self, wanted: int) -> Any:
        task = self.loop.create_task(self.arena.lease_many([PAGE] * wanted, timeout_s=FOREVER))
        self.line.append(Call(wanted, task))
        return self.settle()

    @rule(target=leases, wanted=st.integers(1, SLABS))
    def lease_many_without_time(self, wanted: int) -> Any:
        expected = 0 if self.line else min(wanted, SLABS - self.used())
        buffers = self.loop.run_until_complete(self.arena.lease_many([PAGE] * wanted, timeout_s=0))
        assert len(buffers) == expected
        return multiple(*self.took(buffers))

    @rule(target=leases, held=leases)
    def retain(self, held: Held) -> Any:
        if held not in self.held:
            return multiple()
        again = Held(held.buffer.retain(), held.stamp)
        self.held.append(again)
        return again

    @rule(target=leases, held=consumes(leases))
    def release(self, held: Held) -> Any:
        self.end(held)
        return self.settle()

    @rule(target=views, held=leases)
    def keep_a_view(self, held: Held) -> Any:
        kept = Kept(held.buffer.address, held.stamp, held.buffer.view[10:20])
        self.kept.append(kept)
        return kept

    @rule(target=leases, kept=consumes(views))
    def drop_a_view(self, kept: Kept) -> Any:
        assert kept.view == bytes([kept.stamp]) * 10  # even after its lease
        self.kept.remove(kept)
        kept.view = None
        return self.settle()

    @precondition(lambda self: self.line)
    @rule(target=leases, number=st.integers(0, 9))
    def cancel(self, number: int) -> Any:
        call = self.line.pop(number % len(self.line))
        call.task.cancel()
        result = self.settle()
        assert call.task.cancelled()
        return result

    @precondition(lambda self: self.line)
    @rule(
        target=leases,
        number=st.integers(0, 9),
        held=consumes(leases),
        order=st.sampled_from(["cancel first", "release first", "grant between", "serve after both"]),
    )
    def cancel_and_release_in_one_turn(self, number: int, held: Held, order: str) -> Any:
        call = self.line[number % len(self.line)]
        if order == "grant between":
            # Other calls may be served before this one ends, which the model does not cover.
            call = self.line[0]
        self.line.remove(call)
        if order in {"cancel first", "serve after both"}:
            call.task.cancel()
        self.end(held)
        if order in {"grant between", "serve after both"}:
            self.arena._serve()
        call.task.cancel()
        result = self.settle()
        assert call.task.cancelled()
        return result

    @invariant()
    def the_arena_agrees(self) -> None:
        statistics = self.arena.statistics()
        assert statistics.leased_slabs == self.used()
        assert statistics.waiting == len(self.line)
        assert not any(call.task.done() for call in self.line)
        lingering = {kept.address for kept in self.kept} - {held.buffer.address for held in self.held}
        assert statistics.lingering_slabs == len(lingering)

    @invariant()
    def leases_lie_in_the_region(self) -> None:
        offsets = np.array([held.buffer.address for held in self.held], dtype=np.int64) - self.arena.address
        assert ((offsets % PAGE == 0) & (offsets >= 0) & (offsets < SLABS * PAGE)).all()

    def teardown(self) -> None:
        for call in self.line:
            call.task.cancel()
        self.turn()
        for held in list(self.held):
            self.end(held)
        for kept in self.kept:
            kept.view = None
        self.turn()
        try:
            assert self.arena.statistics().leased_slabs == 0
            assert self.arena.statistics().waiting == 0
        finally:
            self.arena.close()
            self.loop.close()


class UvloopArenaMachine(ArenaMachine):
    new_loop = staticmethod(uvloop.new_event_loop)


TestArena = ArenaMachine.TestCase
TestArenaOnUvloop = UvloopArenaMachine.TestCase
TestArena.settings = TestArenaOnUvloop.settings = settings(stateful_step_count=40)
