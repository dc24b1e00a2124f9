"""Prompts larger than the arena: a slower tier gets all chunks, batch by batch, within the store's deadline."""

import asyncio

import pytest

from lmcache_async.testing.fakes import FaultyTier, GatedTier, unavailable
from lmcache_async.testing.rig import Rig
from tests.simulation import loop as simulation
from tests.support.engines import chunks_of, hits, leased
from tests.support.tiers import Made

CHUNKS = 20
TOKENS = list(range(500, 500 + 8 * CHUNKS - 3))  # the last chunk is partial
SLOTS = range(len(TOKENS))


def rig_of(slabs):
    rig = Rig(slabs=slabs, blocks=64)
    rig.write(SLOTS, rig.content(TOKENS))
    return rig


def settings(*tiers, **others):
    """With an `allocate_timeout_s` of 0, a call that waits for memory fails at once."""
    return {
        "tiers": list(tiers),
        "store.batch_bytes": "32MiB",
        "retrieve.batch_bytes": "32MiB",
        "store.allocate_timeout_s": 0,
    } | others


def nothing_is_held(engine):
    writer = engine.statistics().writers["dict"]
    assert leased(engine) == writer.queued_bytes == writer.queued_chunks == 0


@pytest.mark.parametrize("tiers", [("cpu", "dict"), ("dict",), ("dict", "cpu")], ids=" ".join)
@pytest.mark.parametrize("slabs", [1, 2, 3, 5, 19])
async def test_all_chunks_of_a_prompt_are_in_the_slower_tier_and_come_back(slabs, tiers):
    rig, made = rig_of(slabs), Made()
    async with rig.open(registry=made.registry, **settings(*tiers)) as engine:
        report = await engine.store(TOKENS, SLOTS)

        assert (report.stored, report.dropped) == (CHUNKS, {})
        assert len(made.records) == CHUNKS
        assert await engine.lookup(TOKENS) == len(TOKENS)
        assert await hits(rig, engine, TOKENS) == len(TOKENS)
        assert await engine.flush(timeout_s=60)
        nothing_is_held(engine)


async def test_a_store_waits_for_a_slow_tier_as_long_as_its_deadline_lets():
    rig, made = rig_of(4), Made(GatedTier)
    async with rig.open(registry=made.registry, **settings("cpu", "dict")) as engine:
        storing = asyncio.ensure_future(engine.store(TOKENS, SLOTS))
        await made.tier.parked.wait()
        held = engine.statistics().writers["dict"]
        assert held.queued_bytes <= held.max_bytes
        assert not storing.done()

        made.tier.open_gate()
        report = await storing

        assert (report.stored, report.dropped) == (CHUNKS, {})
        assert len(made.records) == CHUNKS


def test_chunks_for_a_stuck_tier_are_dropped_at_the_deadline_and_counted():
    async def check():
        rig, made = rig_of(4), Made(GatedTier)
        async with rig.open(
            registry=made.registry, **settings("cpu", "dict", **{"store.timeout_s": 1.0})
        ) as engine:
            report = await engine.store(TOKENS, SLOTS)

            assert report.stored + sum(report.dropped.values()) == CHUNKS
            assert report.dropped["deadline"] >= CHUNKS - 4
            made.tier.open_gate()
            assert await engine.flush(timeout_s=60)
            nothing_is_held(engine)

    simulation.run(check)  # in virtual time


def test_a_chunk_in_memory_counts_as_stored_if_a_slower_tier_misses_the_deadline():
    async def check():
        rig, made = rig_of(2 * CHUNKS), Made(GatedTier)
        async with rig.open(
            registry=made.registry, **settings("cpu", "dict", **{"store.timeout_s": 1.0})
        ) as engine:
            report = await engine.store(TOKENS, SLOTS)
            made.tier.open_gate()

            assert (report.stored, report.tokens, dict(report.dropped)) == (CHUNKS, len(TOKENS), {})

    simulation.run(check)  # in virtual time


async def test_chunks_that_a_slower_tier_has_are_not_written_again_for_memory_that_cannot_hold_them():
    rig, made = rig_of(4), Made()
    async with rig.open(registry=made.registry, **settings("cpu", "dict")) as engine:
        await engine.store(TOKENS, SLOTS)
        again = await engine.store(TOKENS, SLOTS)
        third = await engine.store(TOKENS, SLOTS)

    assert (again.stored, again.present) == (4, CHUNKS - 4)  # the prefix, back into memory
    assert (third.stored, third.present) == (0, CHUNKS)


@pytest.mark.parametrize("batch_chunks", [1, 3, 20])
@pytest.mark.parametrize("slower", [(), ("dict",)], ids=["alone", "with a slower tier"])
async def test_memory_smaller_than_the_arena_keeps_the_prefix_of_a_prompt(slower, batch_chunks):
    rig, made = rig_of(32), Made()
    memory = {"name": "cpu", "max_bytes": 4 * rig.slab_bytes}
    batch = {"store.batch_bytes": batch_chunks * rig.slab_bytes}
    async with rig.open(registry=made.registry, **settings(memory, *slower, **batch)) as engine:
        await engine.store(TOKENS, SLOTS)
        await engine.store(TOKENS, SLOTS)  # batches of the first one may have been stored in another order
        report = await engine.store(TOKENS, SLOTS)

        assert (report.stored, report.present) == (0, CHUNKS if slower else 4)
        assert await engine.lookup(TOKENS) == (len(TOKENS) if slower else 4 * 8)
        keys = [chunk.key for chunk in chunks_of(engine, TOKENS)]
        assert {key async for key in engine._parts.stack.tiers[0].tier.keys()} == {*keys[:4]}  # noqa: SIM118


async def test_a_tier_that_fails_is_a_counted_drop_and_no_wait():
    rig, made = rig_of(4), Made(FaultyTier)
    async with rig.open(registry=made.registry, **settings({"name": "dict", "layers": []})) as engine:
        made.tier.faults.extend([unavailable()] * 1000)
        report = await engine.store(TOKENS, SLOTS)

        assert report.stored == 0
        assert sum(report.dropped.values()) == CHUNKS
        assert "deadline" not in report.dropped
        nothing_is_held(engine)


@pytest.mark.parametrize("steps", range(0, 120, 7))
async def test_a_cancellation_at_any_await_loses_no_slab(steps):
    rig, made = rig_of(4), Made()
    async with rig.open(registry=made.registry, **settings("cpu", "dict")) as engine:
        task = asyncio.ensure_future(engine.store(TOKENS, SLOTS))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert await engine.flush(timeout_s=60)
        nothing_is_held(engine)

        await engine.store(TOKENS, SLOTS)
        assert len(made.records) == CHUNKS
