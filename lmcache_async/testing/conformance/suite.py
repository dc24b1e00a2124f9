"""All cases as one class."""

from __future__ import annotations

from lmcache_async.testing.conformance.batches import BatchCases, RemovalCases
from lmcache_async.testing.conformance.cancellation import CancellationCases
from lmcache_async.testing.conformance.capacity import CapacityCases
from lmcache_async.testing.conformance.content import ContentCases
from lmcache_async.testing.conformance.damage import DamageCases
from lmcache_async.testing.conformance.lifecycle import LifecycleCases
from lmcache_async.testing.conformance.overlap import OverlapCases


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
