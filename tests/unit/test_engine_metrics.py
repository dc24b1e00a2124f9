"""What an engine counts, as metrics, over real tiers."""

from collections import Counter

from lmcache_async.engine.metrics import SERIES, engine_families
from lmcache_async.errors import TierUnavailableError
from lmcache_async.observability.families import exposition
from lmcache_async.observability.totals import BUCKETS_S, Totals
from lmcache_async.testing.fakes import DictTier, FakeRegistry
from lmcache_async.testing.rig import Rig
from lmcache_async.types import RetrieveReport, StoreReport

TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8
SLOTS = list(range(40))


def values(engine):
    """Values of all samples by name and labels; of a histogram how many were observed."""
    families = engine_families(engine.statistics(), engine.totals)
    assert exposition(families)
    return {
        (family.name.removeprefix("lmcache_async_"), *sample.labels): sum(sample.counts) or sample.value
        for family in families
        for sample in family.samples
    }


async def test_a_store_and_two_hits_are_counted_by_tier(tmp_path):
    rig = Rig()
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB"}
    async with rig.open(tiers=["cpu", disk]) as engine:
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
    assert told["tier_chunks", "disk"] == 5
    assert told["tier_max_bytes", "disk"] == 64 << 20
    assert told["tier_call_bytes_total", "disk", "get_many"] > 40 * 2 * 2 * 4 * 4
    assert told["tier_call_seconds", "disk", "get_many"] >= 1
    assert told["breaker_state", "disk", "read"] == 0
    assert told["queue_bytes", "disk"] == 0
    assert told["queue_max_bytes", "disk"] > 0
    assert told["arena_bytes",] == rig.slabs * rig.slab_bytes


class _Full(DictTier):
    async def put(self, key, buffer):
        raise TierUnavailableError("no room here")


async def test_drops_errors_and_an_open_breaker_have_their_causes():
    rig = Rig()
    async with rig.open(registry=FakeRegistry(tiers={"full": _Full}), tiers=["full"]) as engine:
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


async def test_a_broken_record_is_counted_once_by_cause_and_by_who_found_it(tmp_path):
    rig = Rig()
    async with rig.open(tiers=[{"name": "disk", "path": str(tmp_path), "max_bytes": "1MiB"}]) as engine:
        await engine.store(TOKENS, SLOTS)
        path = next(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096)
        content = bytearray(path.read_bytes())
        content[4096] ^= 255
        path.write_bytes(content)
        await engine.retrieve(TOKENS, SLOTS)
        told = values(engine)

    found = {tuple(labels): n for (name, *labels), n in told.items() if name == "corrupt_records_total"}
    assert found == {("disk", "checksum", "verify"): 1}


async def test_ids_with_dots_keep_their_own_counts(tmp_path):
    rig = Rig()
    disk = {"name": "disk", "max_bytes": "1MiB"}
    tiers = [disk | {"id": name, "path": str(tmp_path / name)} for name in ("a", "a.b")]
    async with rig.open(tiers=tiers) as engine:
        await engine.store(TOKENS, SLOTS)
        await engine.retrieve(TOKENS, SLOTS)
        told = values(engine)

    assert told["tier_hit_chunks_total", "a"] == 5
    assert told["tier_hit_chunks_total", "a.b"] == 0
    assert told["tier_stored_chunks_total", "a"] == told["tier_stored_chunks_total", "a.b"] == 5


def test_every_series_has_one_name_and_a_base_unit():
    names = [family.name for family in SERIES]

    assert len(set(names)) == len(names)
    for family in SERIES:
        assert family.name.startswith("lmcache_async_")
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not family.name.endswith(("_ms", "_mb", "_gb", "_percent"))
        assert bool(family.buckets) == (family.kind == "histogram")
        assert family.help.endswith(".")


def test_totals_put_a_time_into_the_bucket_whose_bound_it_does_not_pass():
    totals = Totals()
    told = []
    totals.changed = lambda: told.append(1)
    totals.retrieved("r", RetrieveReport(seconds=BUCKETS_S[3], by_tier=Counter(cpu=3), hit_tokens=3))
    totals.retrieved("r", RetrieveReport(seconds=1e6, cause="deadline"))
    totals.stored("r", StoreReport(seconds=0.0, dropped=Counter(deadline=2)))

    assert totals.retrieve_seconds.counts == [0, 0, 0, 1] + [0] * (len(BUCKETS_S) - 4) + [1]
    assert totals.store_seconds.counts[0] == 1
    assert totals.retrieves == {"complete": 1, "deadline": 1}
    assert totals.dropped_chunks == {"deadline": 2}
    assert len(told) == 3
