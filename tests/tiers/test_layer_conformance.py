"""A tier with layers passes the conformance suite: with each layer alone, and with the default layers."""

from __future__ import annotations

from collections.abc import Sequence
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

METRICS = (MetricsLayer, LayerConfig())
RETRY = (RetryLayer, RetryConfig())
LIMIT = (LimitLayer, LimitConfig(max_calls=2, max_bytes=100_000))
BREAKER = (BreakerLayer, BreakerConfig())
DEADLINE = (DeadlineLayer, DeadlineConfig(lookup_s=60, read_s=60, write_s=60))
FAULTS = (FaultsLayer, FaultsConfig())


class LayersConformance(LayerConformance, SuffixEvictionConformance):
    layers: ClassVar[Sequence[tuple[type[Layer], LayerConfig]]] = ()

    def make_layers(self) -> list[Layer]:
        return [layer(options, self.context()) for layer, options in self.layers]


@pytest.mark.one_loop
class TestNoLayers(LayersConformance):
    pass


@pytest.mark.one_loop
class TestMetrics(LayersConformance):
    layers = (METRICS,)


@pytest.mark.one_loop
class TestRetry(LayersConformance):
    layers = (RETRY,)


@pytest.mark.one_loop
class TestLimit(LayersConformance):
    layers, local_index = (LIMIT,), False


@pytest.mark.one_loop
class TestBreaker(LayersConformance):
    layers, local_index = (BREAKER,), False


@pytest.mark.one_loop
class TestDeadline(LayersConformance):
    layers, local_index = (DEADLINE,), False


@pytest.mark.one_loop
class TestFaultsThatNeverStrike(LayersConformance):
    layers = (FAULTS,)


class TestAllTogether(LayersConformance):
    layers, local_index = (METRICS, RETRY, LIMIT, BREAKER, DEADLINE, FAULTS), False
