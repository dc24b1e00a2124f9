"""A layer around an honest tier is an honest tier: each of them alone, and the usual ones together."""

from __future__ import annotations

import logging

from lmcache_async.logging import LimitedLogger
from lmcache_async.testing.conformance import LayerConformance, SuffixEvictionConformance
from lmcache_async.tiers.base import Capabilities, Tier
from lmcache_async.tiers.layers.base import LayerConfig, TierLayer
from lmcache_async.tiers.layers.border import BorderLayer
from lmcache_async.tiers.layers.breaker import BreakerConfig, BreakerLayer
from lmcache_async.tiers.layers.deadline import DeadlineConfig, DeadlineLayer
from lmcache_async.tiers.layers.faults import FaultsConfig, FaultsLayer
from lmcache_async.tiers.layers.guard import GuardLayer
from lmcache_async.tiers.layers.limit import LimitConfig, LimitLayer
from lmcache_async.tiers.layers.metrics import MetricsLayer
from lmcache_async.tiers.layers.retry import RetryConfig, RetryLayer
from tests.tiers.layered import context


class Far(TierLayer):
    """A tier whose lookups are worth bounding, retrying and counting."""

    @property
    def capabilities(self) -> Capabilities:
        near = self.inner.capabilities
        return Capabilities(persistent=near.persistent, removes=near.removes, lists=near.lists)


def guarded(tier: Tier) -> Tier:
    return GuardLayer(tier, name="t", timeout_s=60, logger=LimitedLogger(logging.getLogger("test")))


def bordered(tier: Tier) -> Tier:
    return BorderLayer(tier, name="t", logger=LimitedLogger(logging.getLogger("test")))


def metrics(tier: Tier) -> Tier:
    return MetricsLayer(tier, LayerConfig(), context())


def retry(tier: Tier) -> Tier:
    return RetryLayer(tier, RetryConfig(), context())


def limit(tier: Tier) -> Tier:
    return LimitLayer(tier, LimitConfig(max_calls=2, max_bytes=100_000), context())


def breaker(tier: Tier) -> Tier:
    return BreakerLayer(tier, BreakerConfig(), context())


def deadline(tier: Tier) -> Tier:
    return DeadlineLayer(tier, DeadlineConfig(lookup_s=60, read_s=60, write_s=60), context())


def faults(tier: Tier) -> Tier:
    return FaultsLayer(tier, FaultsConfig(), context())


class TestGuard(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return guarded(inner)


class TestBorder(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return bordered(inner)


class TestMetrics(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return metrics(inner)


class TestRetry(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return retry(inner)


class TestLimit(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return limit(Far(inner))


class TestBreaker(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return breaker(Far(inner))


class TestDeadline(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return deadline(Far(inner))


class TestFaultsThatNeverStrike(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return faults(inner)


class TestAllTogether(LayerConformance, SuffixEvictionConformance):
    def wrap(self, inner: Tier) -> Tier:
        return guarded(metrics(retry(limit(breaker(deadline(faults(bordered(Far(inner)))))))))
