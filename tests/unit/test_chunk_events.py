"""Chunk events of tiers: stored and removed."""

import asyncio
import os
from collections import defaultdict
from pathlib import Path

import pytest

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import TierUnavailableError
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk.files import RecordFiles
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import key_of, record, small_arena
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.middleware.base import Layer, LayerConfig
from tests.support.gates import Gate
from tests.support.tiers import altered, handle_of, raises, registry_of
from tests.tiers.disk_tools import RECORD_BYTES, path_of
from tests.tiers.layered import context, in_virtual_time

TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8
SLOTS = list(range(40))


class Watching:
    """A subscriber that keeps the set of each tier's chunks."""

    def __init__(self):
        self.has = defaultdict(set)

    def stored(self, tier, keys):
        self.has[tier].update(keys)

    def removed(self, tier, keys):
        self.has[tier].difference_update(keys)


def opened(rig, watcher, registry=None, **settings):
    return CacheEngine.open(
        rig.config(**settings),
        layout=rig.layout,
        namespace=rig.namespace,
        registry=registry,
        watcher=watcher,
    )


async def held(engine, tier):
    [stacked] = [one for one in engine._parts.stack.tiers if one.id == tier]
    return {key async for key in stacked.tier.keys()}  # noqa: SIM118 - a tier's


async def agree(engine, watcher, *tiers):
    assert await engine.flush(timeout_s=60)
    for tier in tiers:
        assert watcher.has[tier] == await held(engine, tier)


@pytest.mark.parametrize("disk_chunks", [4, 100])
async def test_chunk_events_agree_with_the_content_of_the_tiers(tmp_path, disk_chunks):
    """With stores, evictions of both tiers, promotion and clearing."""
    rig, watcher = Rig(slabs=8), Watching()
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": disk_chunks * rig.slab_bytes}
    async with opened(rig, watcher, tiers=["cpu", disk]) as engine:
        for first in range(0, 900, 100):
            await engine.store([first + token for token in TOKENS], SLOTS)
            await agree(engine, watcher, "cpu", "disk")
        statistics = engine.statistics()
        assert statistics.tiers["cpu"].evictions
        assert bool(statistics.tiers["disk"].evictions) == (disk_chunks == 4)

        await engine.clear(memory_only=True)
        assert watcher.has["cpu"] == set()
        await engine.retrieve([800 + token for token in TOKENS], SLOTS)
        await agree(engine, watcher, "cpu", "disk")
        assert watcher.has["cpu"]
        await engine.clear()
        await agree(engine, watcher, "cpu", "disk")
        assert not watcher.has["disk"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[4096] ^= 255
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, 4096)


@pytest.mark.parametrize(
    ("damage", "found_by"),
    [
        (flip, "retrieve"),
        (truncate, "retrieve"),
        (Path.unlink, "retrieve"),
        (flip, "scrub"),
        (Path.unlink, "scrub"),
    ],
)
async def test_a_record_that_is_damaged_or_missing_is_removed(tmp_path, damage, found_by):
    rig, watcher = Rig(), Watching()
    async with opened(
        rig, watcher, tiers=[{"name": "disk", "path": str(tmp_path), "max_bytes": "1MiB"}]
    ) as engine:
        await engine.store(TOKENS, SLOTS)
        assert len(watcher.has["disk"]) == 5
        damage(next(one for one in tmp_path.rglob("*") if one.is_file() and one.stat().st_size > 4096))
        if found_by == "scrub":
            await engine.scrub()
        else:
            await engine.retrieve(TOKENS, SLOTS)

        await agree(engine, watcher, "disk")
        assert len(watcher.has["disk"]) == 4


@pytest.mark.parametrize("local_index", [True, False])
async def test_a_clear_that_fails_removes_what_it_has_cleared(local_index):
    class Tier(DictTier):
        capabilities = Capabilities(removes=True, lists=True, local_index=local_index)

        async def remove(self, key):
            if len(self.records) == 2:
                raise TierUnavailableError("away")
            return await super().remove(key)

    rig, watcher = Rig(), Watching()
    async with opened(rig, watcher, registry_of(dict=Tier), tiers=["dict"]) as engine:
        await engine.store(TOKENS, SLOTS)
        with pytest.raises(TierUnavailableError, match="away"):
            await engine.clear()

        assert watcher.has["dict"] == (await held(engine, "dict") if local_index else set())


@pytest.mark.parametrize("verb", ["remove", "reject"])
async def test_a_removal_that_is_cancelled_after_it_has_removed_a_chunk_is_notified(verb):
    begun = asyncio.Event()

    class Tier(DictTier):
        capabilities = Capabilities(removes=True, lists=True, local_index=True)

        async def remove(self, key):
            if key == key_of(1):
                await super().remove(key)
            begun.set()
            await asyncio.get_running_loop().create_future()

    watcher, arena = Watching(), small_arena(8)
    async with handle_of(Tier(), watcher=watcher) as handle:
        for number in (1, 2):
            with record(arena, number) as buffer:
                await handle.put([(key_of(number), buffer)])
        for number in (1, 2):
            begun.clear()
            call = (
                handle.remove(key_of(number)) if verb == "remove" else handle.reject(key_of(number), "magic")
            )
            removing = asyncio.ensure_future(call)
            await begun.wait()
            removing.cancel()
            await asyncio.wait([removing])
        await handle.drain(timeout_s=5)

        assert watcher.has["t"] == {key_of(2)}
    arena.close()


@pytest.mark.parametrize("ends", ["cancelled", "late"])
@in_virtual_time
async def test_a_write_that_ends_early_notifies_the_chunks_that_it_has_stored(ends):
    class Tier(DictTier):
        capabilities = Capabilities(lists=True, local_index=True)

        async def put_many(self, items):
            await self.put(*items[0])
            await asyncio.get_running_loop().create_future()

    watcher, arena = Watching(), small_arena(8)
    async with handle_of(Tier(), watcher=watcher) as handle:
        items = [(key_of(number), record(arena, number)) for number in range(2)]
        writing = asyncio.ensure_future(handle.put(items))
        await turns(5)
        if ends == "cancelled":
            writing.cancel()
        await asyncio.wait([writing])
        assert await handle.drain(timeout_s=5)

        assert watcher.has["t"] == {key_of(0)}
    for _, buffer in items:
        buffer.release()
    arena.close()


async def test_a_record_that_its_own_batch_evicts_is_removed(tmp_path):
    watcher, arena = Watching(), small_arena(8)
    tier = DiskTier(DiskConfig(path=tmp_path, max_bytes=4 * RECORD_BYTES, io_threads=1))
    async with handle_of(tier, watcher=watcher) as handle:
        items = [(key_of(number), record(arena, number)) for number in range(8)]
        await handle.put(items)
        for _, buffer in items:
            buffer.release()

        assert tier.statistics().evictions
        assert watcher.has["t"] == {key async for key in handle.keys()}  # noqa: SIM118 - a tier's
    arena.close()


async def test_a_chunk_that_is_stored_again_while_the_tier_is_cleared_is_stored():
    begun, ends = asyncio.Event(), asyncio.Event()

    class Tier(DictTier):
        capabilities = Capabilities(removes=True, lists=True, local_index=True)

        async def remove(self, key):
            if key == key_of(2):
                begun.set()
                await ends.wait()
            return await super().remove(key)

    watcher, arena = Watching(), small_arena(8)
    async with handle_of(Tier(), watcher=watcher) as handle:
        with record(arena, 1) as first, record(arena, 2) as second:
            await handle.put([(key_of(1), first), (key_of(2), second)])
            clearing = asyncio.ensure_future(handle.clear())
            await begun.wait()
            await handle.put([(key_of(1), first)])
            ends.set()
            await clearing

        assert watcher.has["t"] == {key_of(1)}
    arena.close()


async def test_a_record_that_is_removed_and_written_again_by_one_call_is_stored(tmp_path):
    watcher, arena = Watching(), small_arena(8)
    config = DiskConfig(path=tmp_path, max_bytes="1MiB")
    async with handle_of(DiskTier(config), watcher=watcher) as handle:
        with record(arena, 1) as buffer:
            await handle.put([(key_of(1), buffer)])
            path_of(config, 1).unlink()

            assert await handle.put([(key_of(1), buffer)]) == [None]
        assert watcher.has["t"] == {key_of(1)}
    arena.close()


async def test_a_record_that_is_being_written_when_the_tier_is_cleared_is_removed(tmp_path, monkeypatch):
    watcher, arena = Watching(), small_arena(8)
    gate = Gate(monkeypatch, RecordFiles, "write", shut=True)
    async with handle_of(DiskTier(DiskConfig(path=tmp_path, max_bytes="1MiB")), watcher=watcher) as handle:
        with record(arena, 1) as buffer:
            writing = asyncio.ensure_future(handle.put([(key_of(1), buffer)]))
            await gate.reached()
            clearing = asyncio.ensure_future(handle.clear())
            await turns(20)
            gate.open()

            assert await writing == [None]
            assert await clearing == 1
        assert watcher.has["t"] == set()
    arena.close()


async def test_chunks_of_a_layer_that_writes_twice_at_once_are_notified():
    class Twice(Layer):
        async def around(self, call, next):
            answers, _ = await asyncio.gather(next(call), next(call))
            return answers

    class Tier(DictTier):
        async def put(self, key, buffer):
            await asyncio.sleep(0)
            await super().put(key, buffer)

    watcher, arena = Watching(), small_arena(8)
    async with handle_of(Tier(), layers=[Twice(LayerConfig(), context())], watcher=watcher) as handle:
        with record(arena, 1) as buffer:
            assert await handle.put([(key_of(1), buffer)]) == [None]

        assert watcher.has["t"] == {key_of(1)}
    arena.close()


async def test_refused_chunks_are_not_notified():
    rig, watcher = Rig(), Watching()
    registry = registry_of(refuses=altered(put=raises(TierUnavailableError("not today"))))
    async with opened(rig, watcher, registry, tiers=["cpu", "refuses"]) as engine:
        await engine.store(TOKENS, SLOTS)

        await agree(engine, watcher, "cpu")
        assert watcher.has["refuses"] == set()
