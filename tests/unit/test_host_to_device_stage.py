"""The host-to-device stage in the engine, with somebody who waits for the load."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from lmcache_async.device.progress import LoadProgress
from lmcache_async.pipeline.batch import RetrieveRequest
from lmcache_async.testing.rig import Rig
from tests.support.engines import chunks_of
from tests.support.tiers import Made

TOKENS = list(range(100, 140))  # 5 chunks
SLOTS = range(60, 100)


async def stored(rig, engine):
    rig.write(range(len(TOKENS)), rig.content(TOKENS))
    await engine.store(TOKENS, range(len(TOKENS)))
    assert await engine.flush(timeout_s=5)
    rig.wipe()


def request_for(rig, engine, progress):
    chunks = chunks_of(engine, TOKENS)
    rows = tuple(np.arange(chunk.start, chunk.stop) + SLOTS[0] for chunk in chunks)
    return RetrieveRequest(chunks=chunks, rows=rows, progress=progress)


@pytest.fixture
def scattered(monkeypatch):
    """Has an engine's copier tell what each scatter is given: the number of jobs, and the progress."""

    def watch(engine):
        scatter, calls = engine.copier.scatter, []

        async def watched(jobs, fence=None, progress=None):
            calls.append((len(jobs), progress))
            await scatter(jobs, fence, progress)

        monkeypatch.setattr(engine.copier, "scatter", watched)
        return calls

    return watch


async def test_a_load_that_was_given_up_writes_nothing_and_says_so(scattered):
    rig = Rig()
    progress = LoadProgress(rig.layout.num_planes)
    progress.wait(1, deadline=time.monotonic())
    async with rig.open() as engine:
        await stored(rig, engine)
        calls = scattered(engine)

        report = await engine.retrieve_chunks(request_for(rig, engine, progress))

        assert (report.cause, report.hit_chunks, report.hit_tokens, report.bytes) == ("given_up", 0, 0, 0)
        assert not report.by_tier
        assert (report.asked_tokens, calls) == (40, [])
        assert (rig.read(range(rig.num_slots)) == -7).all()
        kept = engine.statistics()
        assert kept.arena.leased_slabs == kept.tiers["cpu"].chunks


async def test_a_load_in_one_batch_tells_how_far_it_is(scattered):
    rig = Rig()
    progress = LoadProgress(rig.layout.num_planes)
    async with rig.open() as engine:
        await stored(rig, engine)
        calls = scattered(engine)
        waiting = threading.Thread(
            target=progress.wait, args=(99,), kwargs={"deadline": time.monotonic() + 20}
        )
        waiting.start()

        report = await engine.retrieve_chunks(request_for(rig, engine, progress))

        assert (report.cause, report.hit_chunks, calls) == ("", 5, [(5, progress)])
        waiting.join(20)  # its end is told by the copier alone
        assert not waiting.is_alive()
        assert not progress.abandoned
        assert torch.equal(rig.read(SLOTS), rig.content(TOKENS))


async def test_a_load_that_somebody_waits_for_takes_nothing_from_a_slow_tier(scattered):
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await stored(rig, engine)
        request = request_for(rig, engine, LoadProgress(rig.layout.num_planes))
        for chunk in request.chunks[2:]:
            await engine._parts.stack.tiers[0].tier.remove(chunk.key)
        calls = scattered(engine)

        report = await engine.retrieve_chunks(request)

        assert (report.hit_chunks, report.cause, calls) == (2, "miss", [(2, None)])
        assert (await engine.retrieve_chunks(request_for(rig, engine, None))).hit_chunks == 5


async def test_a_chunk_that_goes_while_it_is_loaded_is_not_waited_for(scattered, monkeypatch):
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await stored(rig, engine)
        cpu = engine._parts.stack.tiers[0].tier
        get = cpu.get

        async def vanishing(keys, allocate):
            await cpu.remove(keys[3])
            return await get(keys, allocate)

        monkeypatch.setattr(cpu, "get", vanishing)

        report = await engine.retrieve_chunks(request_for(rig, engine, LoadProgress(rig.layout.num_planes)))

        assert (report.hit_chunks, report.cause, dict(report.by_tier)) == (3, "vanished", {"cpu": 24})


async def test_a_load_that_somebody_waits_for_stands_in_no_queue(scattered):
    rig = Rig()
    async with rig.open() as engine:
        await stored(rig, engine)
        budget = engine._parts.groups[0].retrieve._budget
        async with budget.lease(budget.max_bytes, timeout_s=1.0):
            report = await engine.retrieve_chunks(
                request_for(rig, engine, LoadProgress(rig.layout.num_planes))
            )

        assert report.hit_chunks == 5


async def test_of_a_load_that_found_only_a_prefix_no_plane_is_told(scattered):
    rig = Rig()
    progress = LoadProgress(rig.layout.num_planes)
    async with rig.open() as engine:
        await stored(rig, engine)
        request = request_for(rig, engine, progress)
        await engine._parts.stack.tiers[0].tier.remove(request.chunks[3].key)
        calls = scattered(engine)

        report = await engine.retrieve_chunks(request)

        assert (report.hit_chunks, calls) == (3, [(3, None)])
        assert progress.begin()
        assert (rig.read(SLOTS[24:]) == -7).all()


async def test_a_load_without_anybody_who_waits_is_as_ever(scattered):
    rig = Rig()
    async with rig.open() as engine:
        await stored(rig, engine)
        calls = scattered(engine)

        report = await engine.retrieve_chunks(request_for(rig, engine, None))

        assert (report.hit_chunks, calls) == (5, [(5, None)])
        assert torch.equal(rig.read(SLOTS), rig.content(TOKENS))
