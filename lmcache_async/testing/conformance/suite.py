"""The conformance suites of tiers and of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from lmcache_async.testing.conformance.batches import BatchCases, RemovalCases
from lmcache_async.testing.conformance.cancellation import CancellationCases
from lmcache_async.testing.conformance.capacity import CapacityCases
from lmcache_async.testing.conformance.content import ContentCases
from lmcache_async.testing.conformance.damage import DamageCases
from lmcache_async.testing.conformance.lifecycle import LifecycleCases
from lmcache_async.testing.conformance.overlap import OverlapCases
from lmcache_async.testing.fakes import DictConfig, DictTier
from lmcache_async.tiers.base import Tier
from lmcache_async.types import ChunkKey


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
    content) and `many_keys`.

    It needs pytest and pytest-asyncio, in strict or in auto mode, and no fixtures of this project.
    """


class LayerConformance(TierConformance):
    """Tests of a layer around a tier. Subclass it and override `wrap`.

    ```python
    class TestMyLayer(LayerConformance):
        def wrap(self, inner: Tier) -> Tier:
            return MyLayer(inner, retries=3)
    ```
    """

    many_keys: ClassVar[int] = 500  # layers add a cost to each call, not to each chunk stored

    def wrap(self, inner: Tier) -> Tier:
        """Return the layer around `inner`. Must be overridden."""
        raise NotImplementedError(f"{type(self).__name__} has no `wrap`, which puts the layer around a tier")

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
