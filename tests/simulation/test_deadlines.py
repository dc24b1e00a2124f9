"""Deadlines in virtual time: the duration of calls when every tier is as slow as possible."""

import asyncio

import pytest

from lmcache_async.config import EngineConfig
from lmcache_async.pipeline.batch import LOOKUP_SHARE
from lmcache_async.testing.fakes import DictTier, FakeRegistry
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import Capabilities
from tests.simulation.loop import run


class SlowTier(DictTier):
    """A tier whose calls take `SECONDS`."""

    SECONDS = 0.9

    @property
    def capabilities(self):
        return Capabilities(persistent=True, removes=True, lists=True, local_index=True)

    async def contains_many(self, keys):
        await asyncio.sleep(self.SECONDS)
        return [key in self.records for key in keys]

    async def get(self, key, allocate):
        await asyncio.sleep(self.SECONDS)
        return await super().get(key, allocate)

    async def put(self, key, buffer):
        await asyncio.sleep(self.SECONDS)
        await super().put(key, buffer)


class StuckTier(SlowTier):
    SECONDS = 1000.0


def open_engine(rig, tier, **settings):
    return rig.open(
        registry=FakeRegistry(tiers={"slow": tier}),
        tiers=["cpu", {"name": "slow", "timeout_s": 100.0}],
        **{"store.timeout_s": 1.0, "retrieve.timeout_s": 1.0, **settings},
    )


async def seconds_of(awaitable):
    loop = asyncio.get_running_loop()
    start = loop.time()
    result = await awaitable
    return loop.time() - start, result


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("tier", [SlowTier, StuckTier])
def test_a_store_has_one_deadline_for_the_lookup_the_copies_and_the_writes(tier, partial):
    async def check():
        rig = Rig()
        async with open_engine(rig, tier, **{"store.partial_chunks": partial}) as engine:
            seconds, report = await seconds_of(engine.store(list(range(43)), range(43)))
            return seconds, report

    seconds, report = run(check)

    assert 0.9 <= seconds <= 1.01
    assert report.stored + report.dropped.total() == 5 + partial


@pytest.mark.parametrize("tier", [SlowTier, StuckTier])
def test_a_retrieve_has_one_deadline_for_the_plan_and_the_reads(tier):
    async def check():
        rig = Rig()
        async with open_engine(rig, tier) as engine:
            return await seconds_of(engine.retrieve(list(range(40)), range(40)))

    seconds, _ = run(check)

    assert LOOKUP_SHARE <= seconds <= 1.01  # a lookup that takes longer than its share is a miss


def test_a_copy_to_the_device_at_the_deadline_is_reported_as_a_hit():
    """The copy cannot be undone, so the rows have their content."""
    rig = Rig()
    values = rig.content(range(24))

    one = {"retrieve.batch_bytes": rig.slab_bytes, "retrieve.max_in_flight_bytes": rig.slab_bytes}
    settings = {"retrieve.timeout_s": 1.0, "tiers": ["dict"]} | one

    async def check():
        async with rig.open(registry=FakeRegistry(tiers={"dict": DictTier}), **settings) as engine:
            rig.write(range(24), values)
            await engine.store(list(range(24)), range(24))
            rig.wipe()
            return await seconds_of(engine.retrieve(list(range(24)), range(24)))

    seconds, mask = run(check, thread_s=0.4)

    hit = mask.sum()
    assert 1.0 < seconds < 2.0, "no copy was under way at the deadline"
    assert 0 < hit < 24
    assert (rig.read(range(hit)) == values[:, :, :hit]).all()
    assert (rig.read(range(hit, 24)) == -7.0).all()


def test_closing_has_a_deadline_in_the_loops_own_time():
    async def check():
        rig = Rig()
        loop = asyncio.get_running_loop()
        async with open_engine(rig, StuckTier, shutdown_timeout_s=1.0) as engine:
            store = asyncio.ensure_future(engine.store(list(range(8)), range(8)))
            await asyncio.sleep(0.1)
            start = loop.time()
        await asyncio.wait({store})
        return loop.time() - start

    assert run(check) == pytest.approx(1.0, abs=0.1)


def test_closing_writes_the_whole_queue_of_a_slow_tier_by_default():
    kept = {}

    class SlowDisk(DictTier):
        """Stores one record per second."""

        def __init__(self, config):
            super().__init__(config, records=kept)
            self.head = asyncio.Lock()

        async def put(self, key, buffer):
            async with self.head:
                await asyncio.sleep(1.0)
                await super().put(key, buffer)

    default = EngineConfig.model_fields["shutdown_timeout_s"].default

    async def check():
        rig = Rig(slabs=128, blocks=256)
        loop = asyncio.get_running_loop()
        settings = {"shutdown_timeout_s": default, "store.allocate_timeout_s": 0.0, "store.timeout_s": 30.0}
        async with open_engine(rig, SlowDisk, **settings) as engine:
            await engine.store(list(range(40)), range(40))  # the write queue measures the tier's speed
            store = asyncio.ensure_future(engine.store(list(range(1000, 1400)), range(40, 440)))
            await asyncio.sleep(0.5)  # no record of it is written yet
            written, queued = len(kept), engine.statistics().writers["slow"].queued_chunks
            start = loop.time()
        await asyncio.wait({store})
        return written, queued, loop.time() - start

    written, queued, seconds = run(check)

    assert 15 < queued <= 20
    assert len(kept) == written + queued
    assert seconds < default
