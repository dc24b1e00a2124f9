"""What every tier must do, as test classes to subclass."""

from lmcache_async.testing.conformance.capacity import SuffixEvictionConformance
from lmcache_async.testing.conformance.layers import LayerConformance
from lmcache_async.testing.conformance.suite import TierConformance

__all__ = ["LayerConformance", "SuffixEvictionConformance", "TierConformance"]
