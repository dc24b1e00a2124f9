"""Conformance tests for tiers and layers, as test classes to subclass."""

from lmcache_async.testing.conformance.capacity import SuffixEvictionConformance
from lmcache_async.testing.conformance.suite import LayerConformance, TierConformance

__all__ = ["LayerConformance", "SuffixEvictionConformance", "TierConformance"]
