"""The fake tiers: the contract, and their options: failures, blocked calls and delays."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.conformance import LayerConformance, SuffixEvictionConformance, TierConformance
from lmcache_async.testing.fakes import (
    DictConfig,
    DictTier,
    Fault,
    FaultPlan,
    FaultyTier,
    ForwardingTier,
    GatedTier,
    LatencyTier,
)
from lmcache_async.testing.records import SLAB_BYTES, check_record, is_proven, key_of, record
from lmcache_async.testing.steps import turns
from lmcache_async.tiers.base import Tier


class TestDictTier(TierConformance, SuffixEvictionConformance):
    @pytest.fixture
    def tier(self):
        return DictTier()


class FakeConformance(LayerConformance, SuffixEvictionConformance):
    kind: ClassVar[type[ForwardingTier]]

    def wrap(self, inner: Tier) -> Tier:
        tier = self.kind(inner)
        if isinstance(tier, GatedTier):
            tier.open_gate()
        return tier


@pytest.mark.one_loop
class TestForwardingTier(FakeConformance):
    kind = ForwardingTier


@pytest.mark.one_loop
class TestGatedTier(FakeConformance):
    kind = GatedTier


@pytest.mark.one_loop
class TestFaultyTier(FakeConformance):
    kind = FaultyTier


@pytest.mark.one_loop
class TestLatencyTier(FakeConformance):
    kind = LatencyTier


async def put(tier, arena, number):
    with record(arena, number) as buffer:
        await tier.put(key_of(number), buffer)


async def holding(arena, *faults):
    """A FaultyTier with chunk 1 and the given faults of its next calls."""
    tier = FaultyTier(DictTier())
    await put(tier, arena, 1)
    tier.faults.extend(FaultPlan(faults).faults)
    return tier


@pytest.mark.parametrize(
    ("kind", "error"), [("error", TierUnavailableError), ("refuse", TierError), ("bug", RuntimeError)]
)
async def test_a_fault_that_raises_affects_one_call(arena, allocate, kind, error):
    tier = await holding(arena, Fault(kind))
    with pytest.raises(error):
        await tier.get(key_of(1), allocate)
    assert await tier.contains(key_of(1))


async def test_a_flipped_byte_and_a_truncation_are_detected_by_the_record(arena, allocate):
    tier = await holding(arena, Fault("flip", position=-1), Fault("cut", position=5000))
    for _ in range(2):
        got = await tier.get(key_of(1), allocate)
        assert not is_proven(got, 1)
        got.release()
    with await tier.get(key_of(1), allocate) as got:
        check_record(got, 1)


async def test_damage_waits_for_a_read(arena, allocate):
    tier = await holding(arena, Fault("flip"))
    assert await tier.contains(key_of(1))
    await put(tier, arena, 2)
    assert tier.faults
    (await tier.get(key_of(1), allocate)).release()
    assert not tier.faults


async def test_a_dropped_put_stores_nothing_and_a_lie_is_the_opposite(arena):
    tier = await holding(arena, Fault("drop"), Fault("lie"), Fault("lie"))
    await put(tier, arena, 2)
    assert await tier.contains_many([key_of(2), key_of(1), key_of(1)]) == [True, False, True]


async def test_only_a_cancellation_ends_a_hang(arena, allocate):
    tier = await holding(arena, Fault("hang"))
    task = asyncio.ensure_future(tier.get(key_of(1), allocate))
    await turns(20)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_each_chunk_of_a_batch_has_its_own_fault(arena, allocate):
    tier = await holding(arena, None, Fault("error"), None)
    results = await tier.get_many([key_of(1)] * 3, allocate)
    assert [isinstance(result, Buffer) for result in results] == [True, False, True]
    for result in results:
        if isinstance(result, Buffer):
            result.release()


async def test_a_closed_gate_suspends_calls_and_an_open_one_does_not(arena, allocate):
    inner = DictTier()
    tier = GatedTier(inner)
    task = asyncio.ensure_future(put(tier, arena, 1))
    await tier.parked.wait()
    assert not inner.records
    tier.open_gate()
    await task
    assert await tier.contains(key_of(1))
    tier.close_gate()
    task = asyncio.ensure_future(tier.get(key_of(1), allocate))
    await tier.parked.wait()
    task.cancel()
    await asyncio.wait({task})


async def test_latency_is_of_the_loops_clock_and_counts_bytes(arena, allocate, monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    tier = LatencyTier(DictTier(), latency_s=2.0, bytes_per_s=1000.0)
    await put(tier, arena, 1)
    nbytes = tier.statistics().bytes
    (await tier.get(key_of(1), allocate)).release()
    results = await tier.get_many([key_of(1), key_of(1), key_of(2)], allocate)
    for result in results[:2]:
        result.release()
    await tier.count_prefix([key_of(1)])

    assert slept == [2 + nbytes / 1000, 2 + nbytes / 1000, 2 + 2 * nbytes / 1000, 2]


async def test_a_dict_too_small_for_a_record_raises_and_keeps_the_others(arena):
    tier = DictTier(DictConfig(max_bytes=SLAB_BYTES))
    await put(tier, arena, 1)
    with arena.lease_nowait(SLAB_BYTES) as buffer:
        small = DictTier(DictConfig(max_bytes=100))
        with pytest.raises(TierFullError, match="within 100"):
            await small.put(key_of(2), buffer)

    assert small.statistics().bytes == 0
    assert await tier.contains(key_of(1))
