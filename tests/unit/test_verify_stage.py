"""The verify stage in the engine: effects that only a whole chain shows."""

from __future__ import annotations

import pytest

from lmcache_async.hashing import ChunkHasher
from lmcache_async.stages import verify as verify_stage
from lmcache_async.testing.rig import Rig
from tests.support.engines import hits, store
from tests.support.tiers import Made

TOKENS = list(range(100, 116))  # 2 chunks


@pytest.mark.parametrize("position", [60, 4096 + 5], ids=["header", "payload"])
async def test_a_corrupt_record_costs_no_slab(collector_off, position: int) -> None:
    rig, made = Rig(), Made()
    async with rig.open(registry=made.registry, tiers=["dict"]) as engine:
        await store(rig, engine, TOKENS)
        for key, record in made.records.items():
            content = bytearray(record)
            content[position] ^= 1
            made.records[key] = bytes(content)

        assert await hits(rig, engine, TOKENS) == 0

        arena = engine.statistics().arena
        assert (arena.leased_slabs, arena.lingering_slabs) == (0, 0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("position", range(6))
async def test_a_prefix_ends_at_the_first_corrupt_record_whichever_thread_finds_it(
    monkeypatch: pytest.MonkeyPatch, threads: int, position: int
) -> None:
    monkeypatch.setattr(verify_stage, "SHARE_BYTES", 1)  # as with records of many megabytes
    rig, made, tokens = Rig(), Made(), list(range(100, 148))
    settings = {"retrieve.batch_bytes": 6 * rig.slab_bytes, "copy_threads": threads}
    async with rig.open(registry=made.registry, tiers=["dict"], **settings) as engine:
        await store(rig, engine, tokens)
        for chunk in ChunkHasher(rig.namespace.root(), chunk_size=8).extend(tokens)[position::2]:
            made.records[chunk.key] = made.records[chunk.key][:-1] + b"?"

        assert await hits(rig, engine, tokens) == position * 8
