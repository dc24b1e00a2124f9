"""Sealing in the engine: checksums taken by the copy, and those that must not be used."""

from __future__ import annotations

import pytest
import torch

from lmcache_async.device import rows
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.pipeline.batch import FilledBatch
from lmcache_async.registry import STAGES
from lmcache_async.testing.rig import Rig
from tests.support.tiers import Made

TOKENS = list(range(100, 140))  # 5 chunks
STORE = ["hash", "lookup", "allocate", "device_to_host", "seal", "write"]


@pytest.fixture
def digests(monkeypatch):
    """For each gather whether checksums were requested, and its result."""
    gather, given = CpuCopier.gather, []

    async def told(self, *arguments, **options):
        result = await gather(self, *arguments, **options)
        given.append((options["digest"], result))
        return result

    monkeypatch.setattr(CpuCopier, "gather", told)
    return given


@pytest.fixture
def rig():
    return Rig(head_dim=16)  # rows of 64 bytes, the minimum for digests


async def flip(batch: FilledBatch) -> FilledBatch:
    """Change every payload in place."""
    for buffer in batch.buffers:
        buffer.array[4096:] ^= 0x55
    return batch


async def stored_and_loaded(rig, registry, stages):
    """Return the KV loaded through the disk-like tier only, which verifies every checksum."""
    slots = range(len(TOKENS))
    rig.write(slots, rig.content(TOKENS))
    settings = {"tiers": ["dict"], "store.stages": stages}
    async with rig.open(registry=registry, **settings) as engine:
        report = await engine.store(TOKENS, slots)
        assert report.stored == 5
        assert await engine.flush(timeout_s=60)
        rig.wipe()
        assert (await engine.retrieve(TOKENS, slots)).all()
    return rig.read(slots)


@pytest.mark.skipif(rows.compiled is None, reason="no compiler, no digests")
async def test_checksums_taken_by_the_copy_are_those_of_the_records(rig, digests):
    loaded = await stored_and_loaded(rig, Made().registry, STORE)

    assert torch.equal(loaded, rig.content(TOKENS))
    assert digests
    assert all(wanted and given for wanted, given in digests)


async def test_checksums_are_computed_again_after_a_stage_that_changes_payloads(rig, digests):
    registry = Made().registry
    registry._given[STAGES]["flip"] = flip
    stages = [*STORE[:4], "flip", *STORE[4:]]

    loaded = await stored_and_loaded(rig, registry, stages)

    original = rig.content(TOKENS).numpy().view("u1") ^ 0x55
    assert (loaded.numpy().view("u1") == original).all()
    assert digests
    assert not any(wanted or given for wanted, given in digests)
