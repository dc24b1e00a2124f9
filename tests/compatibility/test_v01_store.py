"""This version reads directories written by version 0.1 and computes the same keys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_async import CacheEngine
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.testing import FakeRegistry
from lmcache_async.tiers.offline import OfflineOptions
from tests.compatibility import v01_store
from tests.compatibility.v01_store import CASES, Cache, Case, Prompt, kv_of

BY_NAME = {case.name: case for case in CASES}
STAGES = Path(__file__).parent / "v01_distribution" / "src"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("v01")
    return root, v01_store.unpack(root)


@pytest.fixture(scope="module")
def manifest(unpacked: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return unpacked[1]


@pytest.fixture
def root(unpacked: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the directories that preserves file times."""
    return Path(shutil.copytree(unpacked[0], tmp_path / "stored", copy_function=shutil.copy2))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v01_store.write_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    monkeypatch.syspath_prepend(str(STAGES))
    from lmcache_async_zlib import CompressStage, DecompressStage

    return FakeRegistry(stages={"zlib": CompressStage, "unzlib": DecompressStage})


async def loaded(engine: CacheEngine, cache: Cache, prompt: Prompt) -> int:
    """Number of leading tokens that are loaded; each is compared with the stored content."""
    mask = await engine.retrieve(prompt.tokens, range(100, 100 + prompt.length), namespace=prompt.namespace)
    hit = int(mask.sum())
    assert torch.equal(cache.read(100, hit), kv_of(prompt.tokens)[:, :, :hit])
    return hit


@pytest.mark.parametrize("name", ["plain", "sha256", "encrypted", "durable", "compressed"])
async def test_all_chunks_of_a_directory_are_hits(
    name: str, root: Path, weights: Path, registry: FakeRegistry
) -> None:
    case, cache = BY_NAME[name], Cache(weights)

    async with cache.open(case, root / name, registry) as engine:
        hits = {prompt.name: await loaded(engine, cache, prompt) for prompt in case.prompts}

    assert hits == {prompt.name: prompt.length for prompt in case.prompts}


async def test_the_records_before_an_interrupted_write_are_hits(root: Path, weights: Path) -> None:
    case, cache = BY_NAME["killed"], Cache(weights)
    unfinished = root / "killed" / "rank-1" / "tmp"
    assert list(unfinished.iterdir())

    async with cache.open(case, root / "killed") as engine:
        hit = await loaded(engine, cache, case.prompts[0])

    assert hit == 3 * v01_store.CHUNK
    assert not list(unfinished.iterdir())


async def test_the_same_records_are_evicted_next(root: Path, weights: Path, manifest: dict[str, Any]) -> None:
    case = BY_NAME["evicted"]
    before = v01_store.record_names(root / "evicted")
    await v01_store.fill(Case("evicted", (v01_store.NEXT,), disk=case.disk), root / "evicted", weights, None)
    after = v01_store.record_names(root / "evicted")

    assert before == manifest["cases"]["evicted"]["records"]
    assert sorted(set(before) - set(after)) == manifest["evicted_by_next"]


async def test_the_maintenance_commands_list_every_record(root: Path, manifest: dict[str, Any]) -> None:
    options = OfflineOptions(change=False, in_flight=1, max_record_bytes=1 << 20)
    config = DiskConfig(path=root / "plain" / "rank-1", max_bytes=1 << 20)
    store = DiskTier.offline(config, options)
    async with store:
        listed = sorted(record.key.hex() for record in await store.list())

    assert listed == manifest["cases"]["plain"]["records"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_namespaces_and_keys_are_those_of_version_0_1(
    case: Case, weights: Path, manifest: dict[str, Any]
) -> None:
    cache, expected = Cache(weights), manifest["cases"][case.name]
    prompts = {*case.prompts, *case.then}

    assert cache.namespace(case).text == expected["namespace"]
    assert {prompt.name: cache.keys(case, prompt) for prompt in prompts} == expected["keys"]


def test_fingerprints_of_weights_and_adapters_are_those_of_version_0_1(
    weights: Path, manifest: dict[str, Any]
) -> None:
    assert v01_store.fingerprints(weights) == manifest["fingerprints"]


def test_keys_of_images_and_partial_chunks_are_those_of_version_0_1(manifest: dict[str, Any]) -> None:
    assert v01_store.other_keys() == manifest["other_keys"]


@pytest.mark.needs_vllm
def test_the_namespace_of_a_model_in_vllm_is_that_of_version_0_1(manifest: dict[str, Any]) -> None:
    fields = json.loads(json.dumps(v01_store.vllm_namespace()))

    assert fields == manifest["vllm_namespace"]
