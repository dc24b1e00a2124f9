"""The conformance suites of tiers and of layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from lmcache_async.logging import LimitedLogger
from lmcache_async.testing.conformance.capacity import CapacityCases, SuffixEvictionConformance
from lmcache_async.testing.conformance.concurrency import CancellationCases, LifecycleCases, OverlapCases
from lmcache_async.testing.conformance.content import BatchCases, ContentCases, DamageCases, RemovalCases
from lmcache_async.testing.fakes import DictConfig, DictTier, ForwardingTier, HandleTier
from lmcache_async.tiers.base import Capabilities, Tier
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.middleware.base import Layer, LayerContext
from lmcache_async.types import ChunkKey

__all__ = ["LayerConformance", "SuffixEvictionConformance", "TierConformance"]


class TierConformance(
    ContentCases,
    BatchCases,
    RemovalCases,
    OverlapCases,
    CancellationCases,
    LifecycleCases,
    CapacityCases,
    DamageCases,
):
    """Tests of the whole contract of a tier. Subclass it and define the fixture `tier`.

    ```python
    class TestMyTier(TierConformance):
        @pytest.fixture
        def tier(self, tmp_path):
            return MyTier(MyConfig(path=tmp_path))
    ```

    The fixture returns a new tier, neither bound nor opened; the tests bind and open it. A test of a
    capability that the tier does not declare checks that the tier does not have it. If the defaults do not
    fit, override `reopen` (persistent tiers), `limit` (tiers with a capacity), `damage` (tests of damaged
    content), `stop_backend` (test of a failing backend) and `many_keys`.

    It needs pytest and pytest-asyncio, in strict or in auto mode, and no fixtures of this project.
    """


_TIMEOUT_S = 60.0


class _RemoteTier(ForwardingTier):
    """A tier whose lookups are not answered from memory of this process."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, local_index=False)


class LayerConformance(TierConformance):
    """Tests of layers around a tier. Subclass it and override `make_layers`.

    ```python
    class TestMyLayer(LayerConformance):
        def make_layers(self):
            return [MyLayer(MyConfig(retries=3), self.context())]
    ```

    Attributes:
        local_index: Whether the tier answers lookups from memory of this process. If not, they are calls that
            most layers treat like reads.
    """

    many_keys: ClassVar[int] = 500  # layers add a cost to each call, not to each chunk stored
    reports_evictions: ClassVar[bool] = False  # the handle around the tier takes its events
    local_index: ClassVar[bool] = True

    def make_layers(self) -> Sequence[Layer]:
        """Return new layers, outermost first. Must be overridden."""
        raise NotImplementedError(
            f"{type(self).__name__} has no `make_layers`, which returns the layers to test"
        )

    def context(self) -> LayerContext:
        """Return a context for a layer."""
        return LayerContext("t", "layer", _TIMEOUT_S, LimitedLogger(logging.getLogger(__name__)))

    def wrap(self, tier: DictTier) -> Tier:
        """Return the tier with the layers around it."""
        logger = LimitedLogger(logging.getLogger(__name__))
        inner = tier if self.local_index else _RemoteTier(tier)
        return HandleTier(
            TierHandle(inner, name="t", logger=logger, timeout_s=_TIMEOUT_S, layers=self.make_layers())
        )

    @pytest.fixture
    def records(self) -> dict[ChunkKey, bytes]:
        """Records of the inner tier. They outlive the tier."""
        return {}

    @pytest.fixture
    def tier(self, records: dict[ChunkKey, bytes]) -> Tier:
        self._records = records
        return self.wrap(DictTier(records=records))

    def reopen(self, tier: Tier) -> Tier:
        del tier
        return self.wrap(DictTier(records=self._records))

    def limit(self, tier: Tier, max_bytes: int) -> Tier | None:
        del tier
        return self.wrap(DictTier(DictConfig(max_bytes=max_bytes)))

    async def damage(self, tier: Tier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        del tier
        self._records[key] = edit(self._records[key])
        return True
