"""An engine with several KV cache groups: one memory and one set of tiers, a layout and a namespace per group."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from lmcache_async.engine.builder import EngineGroup
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import ChunkHasher
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.pipeline.report import merge_retrieves
from lmcache_async.testing.rig import Rig

TOKENS = np.arange(24, dtype=np.int32)
SLOTS = list(range(24))


def two_groups() -> tuple[Rig, Rig]:
    """Two groups whose layouts differ in the number of layers and in the block size."""
    return Rig(model="first"), Rig(model="second", layers=3, block_size=8, blocks=16)


@asynccontextmanager
async def opened(first: Rig, *others: Rig, **settings):
    more = [EngineGroup(rig.layout, rig.namespace) for rig in others]
    config = first.config(
        **{"arena.max_bytes": 16 * max(rig.slab_bytes for rig in (first, *others))} | settings
    )
    async with CacheEngine.open(
        config, layout=first.layout, namespace=first.namespace, more_groups=more
    ) as engine:
        yield engine


def chunks_of(rig: Rig):
    hasher = ChunkHasher(rig.namespace.root(), chunk_size=rig.chunk_size, algorithm="xxh3_128")
    return tuple(hasher.extend(TOKENS))


def request_of(kind, rig: Rig, group: int):
    chunks = chunks_of(rig)
    rows = tuple(np.arange(chunk.start, chunk.stop) for chunk in chunks)
    return kind(group=group, chunks=chunks, rows=rows)


async def store(engine: CacheEngine, rig: Rig, group: int):
    rig.write(SLOTS, rig.content(TOKENS.tolist()))
    report = await engine.store_chunks(request_of(StoreRequest, rig, group))
    rig.wipe()
    return report


async def test_a_group_does_not_load_the_records_of_another_one():
    """Equal layouts and equal keys: the namespace of the group is in the record."""
    first = Rig(model="same")
    second = replace(first)
    namespace = replace(first.namespace, extra=(("kv_group", "1"),))
    config = first.config()
    more = [EngineGroup(second.layout, namespace)]
    async with CacheEngine.open(
        config, layout=first.layout, namespace=first.namespace, more_groups=more
    ) as engine:
        await store(engine, first, 0)
        report = await engine.retrieve_chunks(request_of(RetrieveRequest, second, 1))

    assert report.hit_chunks == 0
    assert report.cause == "corrupt"


async def test_all_groups_share_the_arena_and_its_limits():
    rigs = two_groups()
    async with opened(*rigs) as engine:
        budgets = {
            id(getattr(group, name).budget)
            for group in engine._parts.groups
            for name in ("retrieve", "prefetch")
        }
        for group, rig in enumerate(rigs):
            await store(engine, rig, group)
        assert engine.statistics().arena.leased_slabs == 6
        assert await engine.clear() == 6

    assert len(budgets) == 1


async def test_a_slab_has_room_for_a_record_of_the_largest_group():
    first, second = two_groups()
    async with opened(first, second) as engine:
        assert engine.statistics().arena.slab_bytes >= max(first.slab_bytes, second.slab_bytes)


async def test_a_chunk_size_that_is_no_multiple_of_every_groups_block_is_refused():
    first, second = Rig(chunk_size=12), Rig(model="second", block_size=8, blocks=16)
    blocks = [torch.zeros(16, 1, 8, 8)]
    layout = second.layout.from_block_views(blocks, num_blocks=16, block_size=8)

    with pytest.raises(
        ConfigError, match="chunk_size is 12; expected a multiple of the 8 tokens of a block, such as 16"
    ):
        async with CacheEngine.open(
            first.config(),
            layout=first.layout,
            namespace=first.namespace,
            more_groups=[EngineGroup(layout, second.namespace)],
        ):
            pass


async def test_a_chunk_size_whose_token_ids_do_not_fit_in_a_header_is_refused():
    with pytest.raises(ConfigError, match="chunk_size: a record's header would have"):
        async with opened(Rig(), chunk_size=300_000):
            pass


async def test_two_groups_with_one_namespace_are_refused():
    """Their chunks would have the same keys, and each could be loaded as the other."""
    rig = Rig()

    with pytest.raises(ValueError, match="group 2 has the namespace of group 0"):
        async with opened(rig, Rig(model="second"), Rig()):
            pass


async def test_the_groups_of_a_request_are_counted_once():
    rigs = two_groups()
    async with opened(*rigs) as engine:
        reports = []
        for group, rig in enumerate(rigs):
            await store(engine, rig, group)
            request = replace(request_of(RetrieveRequest, rig, group), request_id="r", reported=False)
            reports.append(await engine.retrieve_chunks(request))
        assert engine.metrics.values("retrieves_total") == {("complete",): 0}
        engine.report_retrieved("r", merge_retrieves(reports))

        assert engine.metrics.values("retrieves_total") == {("complete",): 1}
        assert engine.metrics.values("retrieve_hit_tokens_total") == {("cpu",): len(TOKENS)}
