"""The metrics of an engine over real tiers."""

from collections import Counter

import numpy as np

from lmcache_async.errors import TierUnavailableError
from lmcache_async.metrics.metrics import MAX_PLANNED, CallMetrics, EngineMetrics
from lmcache_async.metrics.samples import exposition
from lmcache_async.metrics.series import REQUEST_BUCKETS_S
from lmcache_async.pipeline.report import Drops
from lmcache_async.testing.rig import Rig
from lmcache_async.types import Chunk, ChunkKey, RequestPlan, RetrieveReport, StoreReport
from tests.support.tiers import altered, raises, registry_of

TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8
SLOTS = list(range(40))


def values(engine):
    """Values of all series by name and labels; of a histogram the number of observations."""
    samples = engine.metrics.read()
    assert exposition(samples.families())
    return {
        (series.name, *labels): sum(value[1:]) if isinstance(value, tuple) else value
        for series, labels, value in samples
    }


async def test_a_store_and_two_hits_are_counted_by_tier(tmp_path):
    rig = Rig()
    disk = {"name": "disk", "path": str(tmp_path / "a"), "max_bytes": "64MiB"}
    dotted = disk | {"id": "disk.b", "path": str(tmp_path / "b")}  # has its own counts
    async with rig.open(tiers=["cpu", disk, dotted]) as engine:
        await engine.store(TOKENS, SLOTS)
        await engine.retrieve(TOKENS, SLOTS)
        await engine.clear(memory_only=True)
        await engine.retrieve([*TOKENS, 1, 2, 3, 4, 5, 6, 7, 8], list(range(48)))
        told = values(engine)

    assert told["stores_total",] == 1
    assert told["stored_chunks_total",] == 5
    assert told["stored_tokens_total",] == 40
    assert told["store_bytes_total",] == 5 * (4096 + 8 * 2 * 2 * 4 * 4)
    assert told["retrieves_total", "complete"] == 1
    assert told["retrieves_total", "miss"] == 1
    assert told["retrieve_asked_tokens_total",] == 88
    assert told["retrieve_hit_tokens_total", "cpu"] == 40
    assert told["retrieve_bytes_total",] == 2 * 40 * 2 * 2 * 4 * 4
    assert told["retrieve_hit_tokens_total", "disk"] == 40
    assert told["retrieve_seconds",] == 2
    assert told["store_seconds",] == told["store_copy_seconds",] == 1
    assert told["tier_hit_chunks_total", "cpu"] == told["tier_hit_chunks_total", "disk"] == 5
    assert told["tier_promoted_chunks_total", "cpu"] == 5
    assert told["tier_stored_chunks_total", "disk"] == 5
    assert told["tier_chunks", "disk"] == told["tier_chunks", "disk.b"] == 5
    assert told["tier_hit_chunks_total", "disk.b"] == 0
    assert told["tier_max_bytes", "disk"] == 64 << 20
    assert told["tier_call_bytes_total", "disk", "get_many"] > 40 * 2 * 2 * 4 * 4
    assert told["tier_call_seconds", "disk", "get_many"] >= 1
    assert told["breaker_state", "disk", "read"] == 0
    assert told["queue_bytes", "disk"] == 0
    assert told["queue_max_bytes", "disk"] > 0
    assert told["arena_bytes",] == rig.slabs * rig.slab_bytes


async def test_drops_errors_and_an_open_breaker_have_their_causes():
    rig, full = Rig(), altered(put=raises(TierUnavailableError("no room here")))
    async with rig.open(registry=registry_of(full=full), tiers=["full"]) as engine:
        for start in range(40):
            await engine.store([start * 7 + 1] * 8, SLOTS[:8])
        told = values(engine)

    causes = {labels[0]: count for (name, *labels), count in told.items() if name == "dropped_chunks_total"}
    assert sum(causes.values()) == told["stores_total",] == 40
    assert told["tier_dropped_chunks_total", "full", "TierUnavailableError"] >= 1
    assert told["breaker_state", "full", "write"] == 2
    assert told["breaker_opened_total", "full", "write"] >= 1
    assert told["breaker_refused_total", "full", "write"] >= 1
    assert told["stored_chunks_total",] == 0


def test_a_duration_is_in_the_bucket_whose_bound_it_does_not_exceed():
    metrics = EngineMetrics()
    calls = []
    metrics.changed = lambda: calls.append(1)
    metrics.retrieved("r", RetrieveReport(seconds=REQUEST_BUCKETS_S[3], by_tier=Counter(cpu=3), hit_tokens=3))
    metrics.retrieved("r", RetrieveReport(seconds=1e6, cause="deadline"))
    metrics.stored("r", StoreReport(seconds=0.0, dropped=Counter(deadline=2)))

    assert metrics.retrieve_seconds.counts == [0, 0, 0, 1] + [0] * (len(REQUEST_BUCKETS_S) - 4) + [1]
    assert metrics.store_seconds.counts[0] == 1
    assert metrics.values("retrieves_total") == {("complete",): 1, ("deadline",): 1}
    assert metrics.values("dropped_chunks_total") == {("deadline",): 2}
    assert len(calls) == 3


def test_counts_of_a_tier_start_at_zero_and_are_listed_by_cause():
    metrics = EngineMetrics()
    tier = metrics.tier("a.b")
    assert not metrics.tier_counts()
    tier.written([None, None, TierUnavailableError("full")])
    tier.failed(TierUnavailableError("away"))
    tier.corrupt("checksum")

    assert metrics.tier_counts() == {
        "a.b.stored": 2,
        "a.b.dropped.TierUnavailableError": 1,
        "a.b.errors.TierUnavailableError": 1,
        "a.b.corrupt.checksum": 1,
    }
    assert metrics.read().get("tier_hit_chunks_total", "a.b") == 0


def test_the_outermost_of_several_metrics_layers_is_exported():
    metrics = EngineMetrics()
    tier = metrics.tier("disk")
    inner, outer = tier.calls(), tier.calls()
    inner["get"], outer["get"] = CallMetrics(chunks=9), CallMetrics(chunks=5)

    assert metrics.read().get("tier_call_chunks_total", "disk", "get") == 5


def test_a_planned_prompt_is_not_counted_again_by_its_load():
    metrics = EngineMetrics()
    names = [f"r{number}" for number in range(256)]  # a large step
    for name in names:
        metrics.planned(RequestPlan(request_id=name, prompt_tokens=1000, local_tokens=100, decided="load"))
    for name in names:
        metrics.retrieved(name, RetrieveReport(asked_tokens=900))
    metrics.retrieved("without a plan", RetrieveReport(asked_tokens=7))
    metrics.retrieved("", RetrieveReport(asked_tokens=2))

    assert (metrics.prompt_tokens, metrics.local_tokens) == (256_009, 25_600)
    assert metrics.decided == {"load": 256}


def test_the_number_of_remembered_plans_is_bounded():
    metrics = EngineMetrics()
    for number in range(MAX_PLANNED + 1):
        metrics.planned(RequestPlan(request_id=f"r{number}", prompt_tokens=1))
    metrics.retrieved(f"r{MAX_PLANNED}", RetrieveReport(asked_tokens=1))
    assert metrics.prompt_tokens == MAX_PLANNED + 1

    metrics.retrieved("r0", RetrieveReport(asked_tokens=1))
    assert metrics.prompt_tokens == MAX_PLANNED + 2


def test_drops_have_their_chunks_and_count_them_by_cause():
    chunks = [Chunk(ChunkKey(bytes([number]) * 16), 0, np.arange(4, dtype=np.int32)) for number in range(3)]
    first, plain = Drops(), Counter(masked=2)
    first.add(chunks[:2], "no_room")
    second = Drops(first)
    second.add(chunks[2:], "masked")
    second.add([], "deadline")
    second.add_all(plain)

    assert second == {"no_room": 2, "masked": 3}
    assert second.chunks == [(chunks[0], "no_room"), (chunks[1], "no_room"), (chunks[2], "masked")]
    assert len(first.chunks) == 2
