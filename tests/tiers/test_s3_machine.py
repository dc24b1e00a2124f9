"""The s3 tier compared with a dict, with a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import rule

from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3.stores import open_store
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.s3_server import S3Server, edit_object
from tests.support.thorough import machine_settings


class S3Machine(TierMachine):
    server: ClassVar[S3Server]
    loop_factory = staticmethod(uvloop.new_event_loop)
    late_effects = True

    @rule(part_bytes=st.sampled_from([4096, 20_000, 1 << 20]))
    def restart_with(self, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.restart()

    def make_tier(self, directory: Path, max_bytes: int | None) -> S3Tier:
        del max_bytes  # a bucket has no limit
        self.config: S3Config = self.server.config(part_bytes=getattr(self, "part_bytes", 1 << 20))
        url = f"{self.config.url.rpartition('/')[0]}/{directory.name}"
        self.config = self.config.model_copy(update={"url": url})
        return S3Tier(self.config)

    async def damage_content(self, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        await edit_object(open_store(self.config), key, edit)
        return True


class TestS3Machine(S3Machine.TestCase):  # type: ignore[misc,name-defined]
    settings = machine_settings(8)

    @pytest.fixture(autouse=True)
    def _server(self, s3_server):
        S3Machine.server = s3_server
