"""The metrics layer counts every method and changes nothing."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.metrics.metrics import CallMetrics
from lmcache_async.metrics.series import CALL_BUCKETS_S
from lmcache_async.testing.records import allocator
from lmcache_async.tiers.middleware.base import LayerConfig
from lmcache_async.tiers.middleware.metrics import MetricsLayer
from tests.tiers.layered import (
    HANG,
    LayeredTier,
    ScriptedTier,
    chunks,
    content,
    context,
    in_virtual_time,
    key,
    now,
    release,
    taken,
)

KEYS = [key(number) for number in range(4)]


def measured(inner) -> LayeredTier:
    """Measure with the clock of the loop, which these tests control."""
    return LayeredTier(inner, MetricsLayer(LayerConfig(), context(), clock=now), timeout_s=60)


def verb(tier: LayeredTier, name: str) -> CallMetrics:
    return tier.layer_statistics().verbs[name]


def buckets(metrics: CallMetrics) -> dict[float, int]:
    bounds = [*CALL_BUCKETS_S, float("inf")]
    return {bound: count for bound, count in zip(bounds, metrics.latency, strict=True) if count}


@in_virtual_time
async def test_calls_chunks_bytes_and_hits_by_verb(arena):
    tier = measured(ScriptedTier())
    items = chunks(arena, 3)
    await tier.put(*items[0])
    await tier.put_many(items[1:])
    release(items)
    assert taken(await tier.get(KEYS[0], allocator(arena))) == content(0)
    assert await tier.get(KEYS[3], allocator(arena)) is None
    for result in await tier.get_many(KEYS, allocator(arena)):
        taken(result)
    await tier.contains(KEYS[0])
    await tier.contains(KEYS[3])
    await tier.contains_many(KEYS)
    await tier.count_prefix(KEYS)
    await tier.remove(KEYS[0])
    await tier.reject(KEYS[0], "magic")

    counts = {
        name: (metrics.calls, metrics.chunks, metrics.found, metrics.bytes)
        for name, metrics in tier.layer_statistics().verbs.items()
    }
    assert counts == {
        "put_many": (2, 3, 0, 3000),
        "get_many": (3, 6, 4, 4000),
        "contains_many": (3, 6, 4, 0),
        "count_prefix": (1, 4, 3, 0),
        "remove": (1, 1, 1, 0),
        "reject": (1, 1, 0, 0),
    }


@in_virtual_time
async def test_errors_by_type_of_calls_and_of_chunks_in_batches(arena):
    inner = ScriptedTier()
    tier = measured(inner)
    inner.script.append(TierUnavailableError("away"))
    with pytest.raises(TierUnavailableError):
        await tier.get_many(KEYS, allocator(arena))
    inner.script.append(ValueError("odd"))
    with pytest.raises(TierError, match="get_many raised ValueError: odd"):
        await tier.get_many(KEYS, allocator(arena))
    inner.chunk_errors[KEYS[1]].append(TierError("one"))
    await tier.get_many(KEYS, allocator(arena))
    items = chunks(arena, 3)
    inner.chunk_errors[KEYS[2]].append(TierUnavailableError("away"))
    await tier.put_many(items)
    release(items)

    assert verb(tier, "get_many").errors == {"TierUnavailableError": 1, "TierError": 2}
    assert verb(tier, "get_many").calls == 3
    assert verb(tier, "put_many").errors == {"TierUnavailableError": 1}
    assert verb(tier, "put_many").bytes == 2000


@in_virtual_time
async def test_latencies_fall_into_fixed_buckets():
    inner = ScriptedTier()
    tier = measured(inner)
    for seconds in (0, 0.001, 0.0011, 29, 31):
        inner.script.append(seconds or None)
        await tier.contains(KEYS[0])

    metrics = verb(tier, "contains_many")
    assert buckets(metrics) == {0.00001: 1, 0.001: 1, 0.0025: 1, 30.0: 1, float("inf"): 1}
    assert metrics.seconds == pytest.approx(60.0021)
    assert sum(metrics.latency) == metrics.calls == 5


@in_virtual_time
async def test_running_and_cancelled_calls_are_counted():
    inner = ScriptedTier()
    inner.script.append(HANG)
    tier = measured(inner)
    task = asyncio.ensure_future(tier.contains(KEYS[0]))
    await asyncio.sleep(1)
    assert (verb(tier, "contains_many").in_flight, verb(tier, "contains_many").calls) == (1, 0)
    task.cancel()
    await asyncio.wait({task})

    metrics = verb(tier, "contains_many")
    assert (metrics.in_flight, metrics.calls, metrics.cancelled, metrics.errors) == (0, 1, 1, {})


async def test_a_snapshot_does_not_change():
    tier = LayeredTier(ScriptedTier(), MetricsLayer(LayerConfig(), context()))
    await tier.contains(KEYS[0])
    before = tier.layer_statistics()
    await tier.contains(KEYS[0])

    assert before.verbs["contains_many"].calls == 1
    assert sum(before.verbs["contains_many"].latency) == 1
