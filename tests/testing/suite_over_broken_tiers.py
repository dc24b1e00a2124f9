"""Run by test_kit_finds_broken_tiers.py in a pytest of its own, as a third party runs the kit: in strict mode."""

from __future__ import annotations

import pytest

from lmcache_async.testing import DictConfig, DictTier, TierConformance
from tests.testing.broken_tiers import BROKEN, EvictsInSilence, ExceedsCapacity, TornContentPasses

ABOUT_LIMITS = {DictTier, EvictsInSilence, ExceedsCapacity}
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
        """Only where the fault is about limits: many others do not know of any."""
        return self.kind(DictConfig(max_bytes=max_bytes)) if self.kind in ABOUT_LIMITS else None

    async def damage(self, tier, key, edit):
        if self.kind not in ABOUT_DAMAGE:
            return False
        self.records[key] = edit(self.records[key])
        return True


class TestDictTier(BrokenConformance):
    """The control: nothing is wrong with it."""


for kind in BROKEN:
    globals()[f"Test{kind.__name__}"] = type(f"Test{kind.__name__}", (BrokenConformance,), {"kind": kind})
