"""The host-to-device stage in the engine, with a thread that waits for the load."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from lmcache_async.device.progress import LoadProgress
from lmcache_async.pipeline.batch import RetrieveRequest
from lmcache_async.testing.rig import Rig
from tests.support.engines import chunks_of, store
from tests.support.tiers import Made

TOKENS = list(range(100, 140))  # 5 chunks
SLOTS = range(60, 100)


class Loads:
    """An engine with TOKENS stored.

    Attributes:
        scatters: For each scatter the number of jobs, and the progress.
    """

    def __init__(self, monkeypatch, **settings):
        self.rig = Rig()
        self.progress = LoadProgress(self.rig.layout.num_planes)
        self.scatters = []
        self._monkeypatch, self._context = monkeypatch, self.rig.open(**settings)

    async def __aenter__(self):
        self.engine = engine = await self._context.__aenter__()
        self.memory = engine._parts.stack.tiers[0].tier
        await store(self.rig, engine, TOKENS)
        self.rig.wipe()
        scatter = engine.copier.scatter

        async def watched(jobs, fence=None, progress=None):
            self.scatters.append((len(jobs), progress))
            await scatter(jobs, fence, progress)

        self._monkeypatch.setattr(engine.copier, "scatter", watched)
        return self

    async def __aexit__(self, *error):
        await self._context.__aexit__(*error)

    @property
    def chunks(self):
        return chunks_of(self.engine, TOKENS)

    async def load(self, *, waits=True):
        rows = tuple(np.arange(chunk.start, chunk.stop) + SLOTS[0] for chunk in self.chunks)
        progress = self.progress if waits else None
        return await self.engine.retrieve_chunks(
            RetrieveRequest(chunks=self.chunks, rows=rows, progress=progress)
        )


async def test_an_abandoned_load_writes_nothing_and_reports_it(monkeypatch):
    async with Loads(monkeypatch) as loads:
        loads.progress.wait(1, deadline=time.monotonic())

        report = await loads.load()

        assert (report.cause, report.hit_chunks, report.hit_tokens, report.bytes) == ("given_up", 0, 0, 0)
        assert not report.by_tier
        assert (report.asked_tokens, loads.scatters) == (40, [])
        assert (loads.rig.read(range(loads.rig.num_slots)) == -7).all()
        kept = loads.engine.statistics()
        assert kept.arena.leased_slabs == kept.tiers["cpu"].chunks


async def test_a_load_in_one_batch_reports_progress(monkeypatch):
    async with Loads(monkeypatch) as loads:
        waiting = threading.Thread(
            target=loads.progress.wait, args=(99,), kwargs={"deadline": time.monotonic() + 60}
        )
        waiting.start()

        report = await loads.load()

        assert (report.cause, report.hit_chunks, loads.scatters) == ("", 5, [(5, loads.progress)])
        waiting.join(60)  # only the copier ends the wait
        assert not waiting.is_alive()
        assert not loads.progress.abandoned
        assert torch.equal(loads.rig.read(SLOTS), loads.rig.content(TOKENS))


async def test_an_awaited_load_does_not_read_slow_tiers(monkeypatch):
    async with Loads(monkeypatch, tiers=["cpu", "dict"], registry=Made().registry) as loads:
        for chunk in loads.chunks[2:]:
            await loads.memory.remove(chunk.key)

        report = await loads.load()

        assert (report.hit_chunks, report.cause, loads.scatters) == (2, "miss", [(2, None)])
        assert (await loads.load(waits=False)).hit_chunks == 5


async def test_a_chunk_that_goes_while_it_is_loaded_is_not_waited_for(monkeypatch):
    async with Loads(monkeypatch, tiers=["cpu", "dict"], registry=Made().registry) as loads:
        get = loads.memory.get

        async def vanishing(keys, allocate, **more):
            await loads.memory.remove(keys[3])
            return await get(keys, allocate, **more)

        monkeypatch.setattr(loads.memory, "get", vanishing)

        report = await loads.load()

        assert (report.hit_chunks, report.cause, dict(report.by_tier)) == (3, "vanished", {"cpu": 24})


async def test_an_awaited_load_skips_the_queue(monkeypatch):
    async with Loads(monkeypatch) as loads:
        budget = loads.engine._parts.groups[0].retrieve.budget
        await budget.reserve(budget.max_bytes, timeout_s=60)

        assert (await loads.load()).hit_chunks == 5


async def test_a_load_of_only_a_prefix_reports_no_plane(monkeypatch):
    async with Loads(monkeypatch) as loads:
        await loads.memory.remove(loads.chunks[3].key)

        report = await loads.load()

        assert (report.hit_chunks, loads.scatters) == (3, [(3, None)])
        assert loads.progress.begin()
        assert (loads.rig.read(SLOTS[24:]) == -7).all()
