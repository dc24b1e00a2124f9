"""The state machine finds faults of a tier without specific cases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing import DictConfig, DictTier, TierMachine
from lmcache_async.testing.conformance import base
from lmcache_async.types import ChunkKey
from tests.testing import broken_tiers
from tests.testing.broken_tiers import BROKEN

# Generate without shrinking: only the failure matters.
SETTINGS = settings(
    max_examples=1000,  # it ends at the first failure, usually within ten
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)

# Faults outside of the machine's calls, which the conformance suite detects.
BEYOND_IT = {
    broken_tiers.EndsBeforeOtherPut,
    broken_tiers.EvictsWithoutEvent,
    broken_tiers.LeavesFile,
    broken_tiers.LeavesTask,
    broken_tiers.LeavesThread,
    broken_tiers.ListsLiveRecords,
    broken_tiers.LosesWhenClosed,
    broken_tiers.MergesRepeatedKeys,
    broken_tiers.MissesInOutage,
    broken_tiers.NoMemoryBreaksBatch,
    broken_tiers.OddErrorWhenClosed,
    broken_tiers.OddErrorForLongRecord,
    broken_tiers.OddErrorInOutage,
    broken_tiers.OtherMemory,
    broken_tiers.RemembersMisses,
    broken_tiers.ReportsEvictionsInThread,
    broken_tiers.SharesCancellation,
    broken_tiers.StoresNothingInOutage,
    broken_tiers.SwallowsRejectCancellation,
}
FINDABLE = [kind for kind in BROKEN if kind not in BEYOND_IT]

# A short run with one of these seeds finds faults that otherwise take several hundred examples.
SHORT = settings(SETTINGS, max_examples=30)
SEEDS = {
    broken_tiers.CountsTwice: 1,
    broken_tiers.SwallowsCancellation: 30,
    broken_tiers.HidesCancellation: 22,
}


def machine_of(kind: type[DictTier]) -> type[TierMachine]:
    class Machine(TierMachine):
        def make_tier(self, directory, max_bytes):
            if not hasattr(self, "records"):
                self.records = {}
            return kind(DictConfig(max_bytes=max_bytes), records=self.records)

        async def damage_content(self, key, edit):
            self.records[key] = edit(self.records[key])
            return True

    return Machine


def search(kind: type[DictTier]) -> None:
    """Run the machine until it fails or its examples are used up."""
    if kind in SEEDS:
        run_state_machine_as_test(seed(SEEDS[kind])(machine_of(kind)), settings=SHORT)
    run_state_machine_as_test(machine_of(kind), settings=SETTINGS)


@pytest.mark.parametrize("kind", FINDABLE, ids=lambda kind: kind.__name__)
def test_the_machine_detects_a_broken_tier(kind, monkeypatch):
    monkeypatch.setattr(base, "DEADLINE_S", 0.05)

    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever shows it
        search(kind)


def test_the_machine_passes_a_correct_tier():
    run_state_machine_as_test(machine_of(DictTier), settings=settings(SETTINGS, max_examples=20))


class LateTier(DictTier):
    """A cancelled `put` or `remove` takes effect only after the next call, as with a network."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.sent: list[Callable[[], object]] = []

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        content = bytes(buffer.view)
        await self._send(lambda: self.records.__setitem__(key, content))

    async def remove(self, key: ChunkKey) -> bool:
        there = key in self.records
        await self._send(lambda: self.records.pop(key, None))
        return there

    async def keys(self) -> AsyncIterator[ChunkKey]:
        for key in list(self.records):
            yield key
        for late in self.sent:
            late()
        self.sent.clear()

    async def _send(self, effect: Callable[[], object]) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.sent.append(effect)
            raise
        effect()


@pytest.mark.parametrize("late", [False, True])
def test_late_effects_of_cancelled_calls_are_allowed_if_declared(late):
    class Machine(TierMachine):
        late_effects = late

        def make_tier(self, directory, max_bytes):
            return LateTier(DictConfig())

    with contextlib.nullcontext() if late else pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=100))
