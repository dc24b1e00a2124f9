"""Data-parallel replicas of one config: equal keys, separate directories and ports."""

from __future__ import annotations

import dataclasses
import logging
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.tiers import stacked_tiers
from lmcache_async.errors import ConfigError
from lmcache_async.logging import LimitedLogger
from lmcache_async.maintenance.stores import Stores
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.testing.fakes import FakeRegistry
from lmcache_async.testing.rig import Rig

TOKENS = list(range(24))  # three chunks
DEADLINE_S = 60.0


def disk(path: Path, **options: Any) -> dict[str, Any]:
    return {"name": "disk", "path": str(path), "max_bytes": "64MiB"} | options


def opened(rig: Rig, replica: int, path: Path, **settings: Any) -> AbstractAsyncContextManager[CacheEngine]:
    config = rig.config(tiers=["cpu", disk(path)], **settings)
    return CacheEngine.open(config, layout=rig.layout, namespace=rig.namespace, replica=replica)


async def hits(engine: CacheEngine, tokens: list[int]) -> int:
    return int((await engine.retrieve(tokens, list(range(len(tokens))))).sum())


async def test_two_replicas_of_one_config_store_and_find_it_after_a_restart(tmp_path: Path) -> None:
    rig = Rig()
    own = [TOKENS, [token + 100 for token in TOKENS]]
    async with opened(rig, 0, tmp_path) as first, opened(rig, 1, tmp_path) as second:
        for engine, tokens in zip((first, second), own, strict=True):
            await engine.store(tokens, list(range(len(tokens))))
            assert await engine.flush(timeout_s=DEADLINE_S)

    async with opened(rig, 0, tmp_path) as first, opened(rig, 1, tmp_path) as second:
        found = [[await hits(engine, tokens) for tokens in own] for engine in (first, second)]

    assert found == [[24, 0], [0, 24]]


@pytest.mark.parametrize(
    ("replica", "world_size", "options", "subdirectory"),
    [
        (0, 1, {}, ""),
        (0, 2, {}, "rank-1"),
        (2, 1, {}, "dp2"),
        (2, 2, {}, "dp2-rank-1"),
        (0, 1, {"subdirectory": "mine"}, "mine"),
        (0, 2, {"subdirectory": "mine"}, "mine"),
        (2, 1, {"subdirectory": "mine"}, "mine/dp2"),
        (2, 2, {"subdirectory": "mine"}, "mine/dp2-rank-1"),
    ],
)
def test_the_directory_is_named_by_replica_and_rank(
    tmp_path: Path, replica: int, world_size: int, options: dict[str, str], subdirectory: str
) -> None:
    rig = Rig()
    namespace = dataclasses.replace(
        rig.namespace, world_size=world_size, tp_size=world_size, tp_rank=world_size - 1
    )
    made = []

    class Recorded(DiskTier):
        def __init__(self, config: DiskConfig) -> None:
            super().__init__(config)
            made.append(config.root)

    stacked_tiers(
        FakeRegistry(tiers={"disk": Recorded}),
        rig.config(tiers=[disk(tmp_path, **options)]),
        namespace,
        LimitedLogger(logging.getLogger("test")),
        replica=replica,
    )

    assert made == [tmp_path / subdirectory]


async def test_the_status_page_of_each_replica_has_its_own_port(tmp_path: Path) -> None:
    rig = Rig()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        configured = {"http.listen": f"127.0.0.1:{port - 1}"}
        with pytest.raises(ConfigError, match=f":{port}: "):  # replica 1 uses the next port, which is taken
            await opened(rig, 1, tmp_path, **configured).__aenter__()


async def test_the_directory_of_replicas_alone_is_no_directory_of_records(tmp_path: Path) -> None:
    for name in ("dp1-rank-0", "dp2"):
        (tmp_path / name).mkdir()

    with pytest.raises(ConfigError, match=r"a directory for each rank or replica: .* such as .*/dp1-rank-0"):
        async with Stores().open(tmp_path):
            pass
