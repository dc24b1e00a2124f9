"""Run by test_kit_finds_broken_tiers.py in a separate pytest with strict mode, like a third party's tests."""

from __future__ import annotations

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


for kind in BROKEN:
    globals()[f"Test{kind.__name__}"] = type(f"Test{kind.__name__}", (BrokenConformance,), {"kind": kind})
