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
    """The whole contract of a tier as tests: subclass it and give a fixture `tier`.

    ```python
    class TestMyTier(TierConformance):
        @pytest.fixture
        def tier(self, tmp_path):
            return MyTier(MyConfig(path=tmp_path))
    ```

    The fixture returns a new tier, neither bound nor opened; the cases do that. Cases of what the tier
    does not declare in its `capabilities` check that it does not do it either. Where the defaults do
    not fit, override `reopen` (persistent tiers), `limit` (tiers with a capacity), `damage` (to check
    what corrupted content comes to) and `many_keys`.

    It needs pytest and pytest-asyncio, in its strict mode or in auto mode, and no fixtures of ours.
    """


class LayerConformance(TierConformance):
    """Subclass it and override `wrap`, which puts the layer around a tier.

    ```python
    class TestMyLayer(LayerConformance):
        def wrap(self, inner: Tier) -> Tier:
            return MyLayer(inner, retries=3)
    ```
    """

    many_keys: ClassVar[int] = 500  # a layer's cost is in its calls, not in its content

    def wrap(self, inner: Tier) -> Tier:
        """To be overridden: the layer around `inner`."""
        raise NotImplementedError(f"{type(self).__name__} has no `wrap`, which puts the layer around a tier")

    @pytest.fixture
    def records(self) -> dict[ChunkKey, bytes]:
        """What the tier inside keeps; it outlives the tier."""
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
