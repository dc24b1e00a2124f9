"""The mooncake tier compared with a dict, with restarts of the tier and damage, on a real master and store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import rule

from lmcache_async.plugins.mooncake import MooncakeTier
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.mooncake_pool import MooncakePool, make_config, replace
from tests.support.thorough import machine_settings

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore


class MooncakeMachine(TierMachine):
    loop_factory = staticmethod(uvloop.new_event_loop)
    pool: ClassVar[MooncakePool]
    client: ClassVar[MooncakeDistributedStore]
    batch_bytes = 200_000
    threads = 4

    @rule(batch_bytes=st.sampled_from([1, 100_000, 1 << 20]), threads=st.integers(1, 4))
    def restart_with(self, batch_bytes: int, threads: int) -> None:
        self.batch_bytes, self.threads = batch_bytes, threads
        self.restart()

    def make_tier(self, directory: Path, max_bytes: int | None) -> MooncakeTier:
        del max_bytes  # the pool's own limit applies
        prefix = f"{directory.name}/"
        config = make_config(self.pool, prefix=prefix, batch_bytes=self.batch_bytes, threads=self.threads)
        return MooncakeTier(config, store=self.client)

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        return replace(self.client, self.tier.config.prefix + key.hex(), edit)


class TestMooncakeMachine(MooncakeMachine.TestCase):  # type: ignore[misc,name-defined]
    settings = machine_settings(25)

    @pytest.fixture(autouse=True)
    def _pool(self, mooncake_pool):
        MooncakeMachine.pool = mooncake_pool
        with mooncake_pool.client() as MooncakeMachine.client:
            yield
