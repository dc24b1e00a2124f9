"""The conformance suite for this tier: `pip install '.[test]'`, then `pytest`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from lmcache_async_sqlite import SQLiteConfig, SQLiteTier

from lmcache_async import ChunkKey, Tier
from lmcache_async.testing import TierConformance


class TestSQLiteTier(TierConformance):
    many_keys: ClassVar[int] = 200  # each is a transaction

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return SQLiteTier(SQLiteConfig(path=tmp_path / "chunks.sqlite"))

    async def damage(self, tier: Tier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        assert isinstance(tier, SQLiteTier)
        [(record,)] = await tier._run("SELECT record FROM chunks WHERE key = ?", key)
        await tier._run("UPDATE chunks SET record = ? WHERE key = ?", edit(record), key)
        return True
