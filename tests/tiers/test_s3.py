"""The s3 tier: the contract, against a real S3 server and against other stores of the same client."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
from obstore.store import LocalStore, ObjectStore

from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3.stores import open_store
from lmcache_async.testing.conformance import TierConformance
from lmcache_async.types import ChunkKey
from tests.support.s3_server import edit_object


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
