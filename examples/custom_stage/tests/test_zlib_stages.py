"""Loaded records equal stored ones, or are misses if they were damaged: `pip install '.[test]'`, then `pytest`."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from lmcache_async_zlib import CompressStage, DecompressStage, inflated, shuffled, unshuffled

from lmcache_async import ChunkKey
from lmcache_async.memory.header import read_header
from lmcache_async.testing import DictConfig, DictTier, FakeRegistry
from lmcache_async.testing.rig import Rig

STAGES = {
    "store.stages": ["hash", "lookup", "allocate", "device_to_host", "seal", "zlib", "write"],
    "retrieve.stages": ["hash", "plan", "fetch", "unzlib", "verify", "host_to_device"],
}
TOKENS = list(range(20))


class DictRegistry(FakeRegistry):
    """A registry with the two stages and a tier `dict`, which stores records in the given dict."""

    def __init__(self, records: dict[ChunkKey, bytes]) -> None:
        class SharedDictTier(DictTier):
            def __init__(self, config: DictConfig) -> None:
                super().__init__(config, records=records)

        super().__init__(
            tiers={"dict": SharedDictTier}, stages={"zlib": CompressStage, "unzlib": DecompressStage}
        )


async def store(records: dict[ChunkKey, bytes], *, noise: bool = False, stages: bool = True) -> torch.Tensor:
    rig = Rig(head_dim=32, slabs=32)
    content = rig.content(TOKENS).round(decimals=2)
    if noise:
        content = torch.randn(content.shape, generator=torch.Generator().manual_seed(1))
    rig.write(range(20), content)
    async with rig.open(
        registry=DictRegistry(records), tiers=["cpu", "dict"], **(STAGES if stages else {})
    ) as engine:
        report = await engine.store(TOKENS, range(20))
        assert report.stored == 3
        assert await engine.flush(timeout_s=30)
    return content


async def retrieve(records: dict[ChunkKey, bytes], content: torch.Tensor, *, stages: bool = True) -> int:
    """Return the number of tokens that another engine loads, after comparing them bit by bit."""
    rig = Rig(head_dim=32, slabs=32)
    async with rig.open(
        registry=DictRegistry(records), tiers=["cpu", "dict"], **(STAGES if stages else {})
    ) as engine:
        hit = int((await engine.retrieve(TOKENS, range(40, 60))).sum())
    assert torch.equal(rig.read(range(40, 40 + hit)), content[:, :, :hit])
    assert not rig.read(range(40 + hit, 60)).any()
    return hit


async def test_stored_records_are_smaller_and_loaded_unchanged() -> None:
    records: dict[ChunkKey, bytes] = {}
    content = await store(records)
    headers = [read_header(memoryview(record)) for record in records.values()]

    assert all(header.payload_bytes < header.shape[0] * header.shape[1] for header in headers)
    assert await retrieve(records, content) == 20


async def test_an_incompressible_record_is_stored_uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_async_zlib.LEVEL", 0)
    records: dict[ChunkKey, bytes] = {}
    content = await store(records, noise=True)

    assert all(len(read_header(memoryview(record)).shape) == 2 for record in records.values())
    assert await retrieve(records, content) == 20


async def test_records_stored_without_the_stages_are_hits() -> None:
    records: dict[ChunkKey, bytes] = {}
    content = await store(records, stages=False)

    assert await retrieve(records, content) == 20


async def test_compressed_records_are_misses_without_the_stages() -> None:
    records: dict[ChunkKey, bytes] = {}
    content = await store(records)

    assert await retrieve(records, content, stages=False) == 0


@pytest.mark.parametrize("place", [100, -1], ids=["header", "payload"])
async def test_a_flipped_bit_ends_the_prefix(place: int) -> None:
    records: dict[ChunkKey, bytes] = {}
    content = await store(records)
    second = list(records)[1]
    damaged = bytearray(records[second])
    damaged[place] ^= 1
    records[second] = bytes(damaged)

    assert await retrieve(records, content) == 8
    assert second not in records


def test_a_payload_of_another_length_is_refused_without_decompressing_all_of_it() -> None:
    bomb = memoryview(zlib.compress(bytes(1 << 20)))

    for nbytes in (1 << 10, 1 << 21):
        with pytest.raises(zlib.error, match="expected"):
            inflated(bomb, nbytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_shuffling_is_undone(dtype: str) -> None:
    payload = np.random.default_rng(1).integers(0, 256, 1200, dtype=np.uint8)

    assert (unshuffled(shuffled(payload, dtype), dtype) == payload).all()
