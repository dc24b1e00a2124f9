"""Run by test_kit_finds_broken_tiers.py in a separate pytest with strict mode, like a third party's tests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lmcache_async.testing import DictConfig, DictTier, TierConformance
from tests.testing.broken_tiers import (
    BROKEN,
    EvictsInSilence,
    EvictsWithoutEvent,
    ExceedsCapacity,
    OddErrorForLongRecord,
    ReportsEvictionsInThread,
    TornContentPasses,
)

ABOUT_LIMITS = {
    DictTier,
    EvictsInSilence,
    EvictsWithoutEvent,
    ExceedsCapacity,
    OddErrorForLongRecord,
    ReportsEvictionsInThread,
}
ABOUT_DAMAGE = {DictTier, TornContentPasses}


class BrokenConformance(TierConformance):
    many_keys = 200
    kind = DictTier

    @pytest.fixture
    def tier(self):
        self.records = {}
        return self.kind(records=self.records)

    def reopen(self, tier):
        return self.kind(records=self.records)

    def limit(self, tier, max_bytes):
        """Set a limit for faults that concern limits; many other broken tiers do not support one."""
        return self.kind(DictConfig(max_bytes=max_bytes)) if self.kind in ABOUT_LIMITS else None

    async def stop_backend(self, tier):
        tier.stopped = hasattr(tier, "stopped")
        return tier.stopped

    async def damage(self, tier, key, edit):
        if self.kind not in ABOUT_DAMAGE:
            return False
        self.records[key] = edit(self.records[key])
        return True


class TestDictTier(BrokenConformance):
    """The control: a correct tier."""


class ThreadsOfLoop(DictTier):
    """Uses the threads of the event loop, as `asyncio.to_thread` and aiofiles do: more of them when it is opened again."""

    threads = 1

    async def __aenter__(self):
        same_time = threading.Barrier(self.threads)
        await asyncio.gather(*(asyncio.to_thread(same_time.wait) for _ in range(self.threads)))
        return await super().__aenter__()


class TestThreadsOfLoop(BrokenConformance):
    """Another correct tier."""

    kind = ThreadsOfLoop

    def reopen(self, tier):
        again = super().reopen(tier)
        again.threads = tier.threads + 1
        return again


for kind in BROKEN:
    globals()[f"Test{kind.__name__}"] = type(f"Test{kind.__name__}", (BrokenConformance,), {"kind": kind})
