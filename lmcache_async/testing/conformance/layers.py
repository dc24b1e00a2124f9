"""The suite for layers: a layer around an honest tier is an honest tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from lmcache_async.testing.conformance.suite import TierConformance
from lmcache_async.testing.fakes import DictConfig, DictTier
from lmcache_async.tiers.base import Tier
from lmcache_async.types import ChunkKey


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
