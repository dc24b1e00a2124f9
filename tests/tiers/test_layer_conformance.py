"""A tier with layers fulfils the contract of a tier: with each layer alone, and with the usual ones together."""

from __future__ import annotations

from typing import ClassVar

import pytest

from lmcache_async.testing.conformance import LayerConformance, SuffixEvictionConformance
from lmcache_async.tiers.middleware.base import Layer, LayerConfig
from lmcache_async.tiers.middleware.breaker import BreakerConfig, BreakerLayer
from lmcache_async.tiers.middleware.deadline import DeadlineConfig, DeadlineLayer
from lmcache_async.tiers.middleware.faults import FaultsConfig, FaultsLayer
from lmcache_async.tiers.middleware.limit import LimitConfig, LimitLayer
from lmcache_async.tiers.middleware.metrics import MetricsLayer
from lmcache_async.tiers.middleware.retry import RetryConfig, RetryLayer


class LayersConformance(LayerConformance, SuffixEvictionConformance):
    def metrics(self) -> Layer:
        return MetricsLayer(LayerConfig(), self.context())

    def retry(self) -> Layer:
        return RetryLayer(RetryConfig(), self.context())

    def limit_layer(self) -> Layer:
        return LimitLayer(LimitConfig(max_calls=2, max_bytes=100_000), self.context())

    def breaker(self) -> Layer:
        return BreakerLayer(BreakerConfig(), self.context())

    def deadline(self) -> Layer:
        return DeadlineLayer(DeadlineConfig(lookup_s=60, read_s=60, write_s=60), self.context())

    def faults(self) -> Layer:
        return FaultsLayer(FaultsConfig(), self.context())


@pytest.mark.one_loop
class TestNoLayers(LayersConformance):
    def make_layers(self) -> list[Layer]:
        return []


@pytest.mark.one_loop
class TestMetrics(LayersConformance):
    def make_layers(self) -> list[Layer]:
        return [self.metrics()]


@pytest.mark.one_loop
class TestRetry(LayersConformance):
    def make_layers(self) -> list[Layer]:
        return [self.retry()]


@pytest.mark.one_loop
class TestLimit(LayersConformance):
    local_index: ClassVar[bool] = False

    def make_layers(self) -> list[Layer]:
        return [self.limit_layer()]


@pytest.mark.one_loop
class TestBreaker(LayersConformance):
    local_index: ClassVar[bool] = False

    def make_layers(self) -> list[Layer]:
        return [self.breaker()]


@pytest.mark.one_loop
class TestDeadline(LayersConformance):
    local_index: ClassVar[bool] = False

    def make_layers(self) -> list[Layer]:
        return [self.deadline()]


@pytest.mark.one_loop
class TestFaultsThatNeverStrike(LayersConformance):
    def make_layers(self) -> list[Layer]:
        return [self.faults()]


class TestAllTogether(LayersConformance):
    local_index: ClassVar[bool] = False

    def make_layers(self) -> list[Layer]:
        return [
            self.metrics(),
            self.retry(),
            self.limit_layer(),
            self.breaker(),
            self.deadline(),
            self.faults(),
        ]
