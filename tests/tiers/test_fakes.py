"""The fakes are tiers like any other: they pass the suite that they help to test."""

from __future__ import annotations

import pytest

from lmcache_async.testing.conformance import LayerConformance, SuffixEvictionConformance, TierConformance
from lmcache_async.testing.fakes import DictTier, FaultyTier, ForwardingTier, GatedTier, LatencyTier
from lmcache_async.tiers.base import Tier


class TestDictTier(TierConformance, SuffixEvictionConformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return DictTier()


@pytest.mark.one_loop
class TestForwardingTier(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return ForwardingTier(inner)


@pytest.mark.one_loop
class TestGatedTier(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        tier = GatedTier(inner)
        tier.open_gate()
        return tier


@pytest.mark.one_loop
class TestFaultyTier(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return FaultyTier(inner)


@pytest.mark.one_loop
class TestLatencyTier(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return LatencyTier(inner)
