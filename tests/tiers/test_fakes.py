"""The fake tiers pass the conformance suite."""

from __future__ import annotations

from typing import ClassVar

import pytest

from lmcache_async.testing.conformance import LayerConformance, SuffixEvictionConformance, TierConformance
from lmcache_async.testing.fakes import DictTier, FaultyTier, ForwardingTier, GatedTier, LatencyTier
from lmcache_async.tiers.base import Tier


class TestDictTier(TierConformance, SuffixEvictionConformance):
    @pytest.fixture
    def tier(self):
        return DictTier()


class FakeConformance(LayerConformance, SuffixEvictionConformance):
    kind: ClassVar[type[ForwardingTier]]

    def wrap(self, inner: Tier) -> Tier:
        tier = self.kind(inner)
        if isinstance(tier, GatedTier):
            tier.open_gate()
        return tier


@pytest.mark.one_loop
class TestForwardingTier(FakeConformance):
    kind = ForwardingTier


@pytest.mark.one_loop
class TestGatedTier(FakeConformance):
    kind = GatedTier


@pytest.mark.one_loop
class TestFaultyTier(FakeConformance):
    kind = FaultyTier


@pytest.mark.one_loop
class TestLatencyTier(FakeConformance):
    kind = LatencyTier
