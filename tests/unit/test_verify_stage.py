"""The verify stage in the engine: what only a whole chain shows."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lmcache_async.hashing import ChunkHasher
from lmcache_async.memory.record import RecordFormat, read_header, seal
from lmcache_async.testing.rig import Rig
from tests.made import Made

TOKENS = list(range(100, 116))  # 2 chunks


@pytest.fixture
def collector_off() -> Iterator[None]:
    """As in vLLM, which freezes what is there and lets little be collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def store(rig: Rig, engine) -> None:
    slots = range(len(TOKENS))
    rig.write(slots, rig.content(TOKENS))
    await engine.store(TOKENS, slots)
    assert await engine.flush(timeout_s=5)


async def hits(rig: Rig, engine) -> int:
    rig.wipe()
    return int((await engine.retrieve(TOKENS, range(len(TOKENS)))).sum())


@pytest.mark.parametrize("position", [60, 4096 + 5], ids=["header", "payload"])
async def test_a_corrupt_record_costs_no_slab(collector_off, position: int) -> None:
    rig, made = Rig(), Made()
    async with rig.open(registry=made.registry, tiers=["dict"]) as engine:
        await store(rig, engine)
        for key, record in made.records.items():
            content = bytearray(record)
            content[position] ^= 1
            made.records[key] = bytes(content)

        assert await hits(rig, engine) == 0

        arena = engine.statistics().arena
        assert (arena.leased_slabs, arena.lingering_slabs) == (0, 0)


async def test_a_record_of_another_shape_is_a_miss() -> None:
    rig, made = Rig(), Made()
    async with rig.open(registry=made.registry, tiers=["dict"]) as engine:
        await store(rig, engine)
        first, second = ChunkHasher(rig.namespace.root(), chunk_size=rig.chunk_size).extend(TOKENS)
        record = bytearray(made.records[second.key])
        header = read_header(memoryview(record))
        seal(
            memoryview(record),
            format=RecordFormat(header.namespace, header.layout, header.dtype, rig.chunk_size),
            chunk=second,
            request_namespace=header.request_namespace,
            shape=(header.shape[0] // 2, header.shape[1] * 2),
            payload_bytes=header.payload_bytes,
        )
        made.records[second.key] = bytes(record)

        assert await hits(rig, engine) == 8
        assert engine.statistics().counts["dict.corrupt.layout"] == 1
        assert set(made.records) == {first.key}
