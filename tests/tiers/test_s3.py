"""The s3 tier: the contract and a comparison with a dict, with a real server and other stores of the same client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import rule
from obstore.store import LocalStore, ObjectStore

from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3.bucket import open_store
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.testing.machines import TierMachine
from lmcache_async.types import ChunkKey
from tests.support.s3_server import S3Server, edit_object
from tests.support.thorough import machine_settings


class S3Conformance(TierConformance):
    """Damages a record as another client of the bucket would."""

    many_keys = 100

    def store(self, tier: S3Tier) -> ObjectStore:
        return open_store(tier.config)

    async def damage(self, tier: S3Tier, key: ChunkKey, edit: Callable[[bytes], bytes]) -> bool:
        await edit_object(self.store(tier), key, edit)
        return True


class TestS3Tier(S3Conformance):
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture
    def tier(self, s3_server):
        return S3Tier(s3_server.config(**self.options))


@pytest.mark.one_loop
class TestS3TierInParts(TestS3Tier):
    """Records of several parts, a low limit of requests, signed contents."""

    options: ClassVar[dict[str, object]] = {"part_bytes": 20_000, "concurrency": 3, "sign_payload": True}


@pytest.mark.one_loop
class TestOverFiles(S3Conformance):
    """The same code over a store that needs no server."""

    @pytest.fixture
    def tier(self, tmp_path):
        return S3Tier(S3Config(url="s3://files", part_bytes=30_000), store=LocalStore(tmp_path))

    def store(self, tier: S3Tier) -> ObjectStore:
        return tier._store

    def reopen(self, tier: S3Tier) -> S3Tier:
        return S3Tier(tier.config, store=tier._store)


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
