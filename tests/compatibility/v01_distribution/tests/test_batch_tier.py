import logging
from pathlib import Path
from typing import ClassVar

import pytest
from batch_tier import BatchConfig, BatchTier
from hypothesis import settings
from my_layers import PacedConfig, PacedLayer

from lmcache_async import LayerContext, Tier
from lmcache_async.logging import LimitedLogger
from lmcache_async.testing import LayerConformance, TierConformance, TierMachine


class TestBatchTier(TierConformance):
    many_keys: ClassVar[int] = 500

    @pytest.fixture
    def tier(self) -> Tier:
        return BatchTier(BatchConfig())


class TestPacedLayer(LayerConformance):
    many_keys: ClassVar[int] = 20

    def wrap(self, inner: Tier) -> Tier:
        context = LayerContext(
            tier="mine",
            layer="paced",
            timeout_s=60,
            logger=LimitedLogger(logging.getLogger("paced")),
        )
        return PacedLayer(inner, PacedConfig(pause_s=0.001), context)


class BatchMachine(TierMachine):
    def make_tier(self, directory: Path, max_bytes: int | None) -> Tier:
        return BatchTier(BatchConfig(max_bytes=max_bytes or 1 << 40))


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
