"""The border around a tier: an engine outlives it, with the default layers and without any."""

from __future__ import annotations

import logging

import pytest

from lmcache_async.errors import ConfigError
from lmcache_async.observability.logging import LimitedLogger
from lmcache_async.testing.conformance.border import BorderConformance
from lmcache_async.testing.misbehaviour import MISBEHAVIOURS, MisbehavingTier
from lmcache_async.tiers.layers.border import BorderLayer


class TestDefaultLayers(BorderConformance):
    """As a config without `layers` has it."""


class TestNoLayers(BorderConformance):
    """Nothing but the border."""

    layers = ()


def test_a_tier_without_capabilities_is_refused() -> None:
    mode = next(mode for mode in MISBEHAVIOURS if str(mode) == "capabilities answers None")
    tier = MisbehavingTier(mode)
    tier.begin()

    with pytest.raises(
        ConfigError, match="tier 'bad': its `capabilities` must be an instance of Capabilities"
    ):
        BorderLayer(tier, name="bad", logger=LimitedLogger(logging.getLogger("test")))
