"""A distribution of tiers, stages and a layer that was written against version 0.1 works unchanged."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry
from lmcache_async.testing.rig import Rig
from tests.support.projects import install, run_tests

PROJECT = Path(__file__).parent / "v01_distribution"
MODULES = [path.stem for path in (PROJECT / "src").glob("*.py")]
TOKENS = list(range(20))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(PROJECT, tmp_path_factory.mktemp("source") / PROJECT.name))


@pytest.fixture(scope="module")
def site(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install(source, target)
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in MODULES:
        sys.modules.pop(name, None)


async def store_and_load(settings: dict[str, Any]) -> None:
    """Store a prompt, and load it in another engine."""
    rig = Rig(slabs=32)
    async with rig.open(**settings) as engine:
        rig.write(range(20), rig.content(TOKENS))
        report = await engine.store(TOKENS, range(20))
        assert report.stored == 3
        assert await engine.flush(timeout_s=30)
    other = Rig(slabs=32)
    async with other.open(**settings) as engine:
        assert (await engine.retrieve(TOKENS, range(40, 60))).all()
    assert (other.read(range(40, 60)) == other.content(TOKENS)).all()


@pytest.mark.parametrize("layers", [None, ["metrics", "paced", "deadline"]], ids=["default", "paced"])
@pytest.mark.parametrize("name", ["folder", "sqlite"])
async def test_a_tier_of_three_methods_is_used_by_name(
    installed: Path, tmp_path: Path, name: str, layers: list[str] | None
) -> None:
    tier: dict[str, Any] = {"name": name, "path": str(tmp_path / "records"), "timeout_s": 5}
    if name == "folder":
        (tmp_path / "records").mkdir()
    if layers is not None:
        tier["layers"] = layers

    await store_and_load({"tiers": ["cpu", tier]})


async def test_the_batch_methods_that_a_tier_overrides_are_called(installed: Path) -> None:
    await store_and_load({"tiers": ["cpu", {"name": "batches", "store": "a"}]})

    from batch_tier import BatchTier

    assert {"put_many", "get_many"} <= set(BatchTier.calls)
    assert {"count_prefix", "contains_many"} & set(BatchTier.calls)
    assert not {"put", "get"} & set(BatchTier.calls)


async def test_stages_are_used_by_name(installed: Path, tmp_path: Path) -> None:
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": "16MiB", "odirect": "auto"}
    store = ["hash", "lookup", "allocate", "device_to_host", "count_tokens", "seal", "zlib", "write"]
    retrieve = ["hash", "plan", "fetch", "unzlib", "verify", "host_to_device"]

    await store_and_load({"tiers": ["cpu", disk], "store.stages": store, "retrieve.stages": retrieve})

    from my_stages import count_tokens

    assert count_tokens.total == len(TOKENS)


def test_the_registry_lists_all_entry_points(installed: Path) -> None:
    names = {
        group: {
            name
            for name, plugin in Registry().available(group).items()
            if plugin.distribution == "lmcache-async-v01"
        }
        for group in (TIERS, STAGES, LAYERS)
    }

    assert names == {
        TIERS: {"sqlite", "folder", "batches"},
        STAGES: {"zlib", "unzlib", "count_tokens"},
        LAYERS: {"paced"},
    }


def test_its_own_tests_pass(source: Path, site: Path) -> None:
    run_tests(source, site=site)
