from pathlib import Path
from typing import ClassVar

import pytest
from batch_tier import BatchConfig, BatchTier
from hypothesis import settings

from lmcache_async import Tier
from lmcache_async.testing import TierConformance, TierMachine


class TestBatchTier(TierConformance):
    many_keys: ClassVar[int] = 500

    @pytest.fixture
    def tier(self) -> Tier:
        return BatchTier(BatchConfig())


class BatchMachine(TierMachine):
    def make_tier(self, directory: Path, max_bytes: int | None) -> Tier:
        return BatchTier(BatchConfig(max_bytes=max_bytes or 1 << 40))


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
