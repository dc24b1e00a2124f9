from pathlib import Path
from typing import ClassVar

import pytest
from my_tiers import FolderConfig, FolderTier

from lmcache_async import Tier
from lmcache_async.testing import TierConformance


class TestFolderTier(TierConformance):
    many_keys: ClassVar[int] = 300

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FolderTier(FolderConfig(path=tmp_path))
