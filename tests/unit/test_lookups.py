"""Lookups by key, and pins of lookups with an id."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmcache_async.engine.lookup import FirstPresent
from lmcache_async.testing.fakes import ForwardingTier
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.middleware.breaker import BreakerStatistics, CircuitState
from lmcache_async.types import ChunkKey
from tests.simulation import loop as simulation
from tests.support import engines
from tests.support.engines import chunks_of
from tests.support.tiers import Made, ParkingTier, altered, hang, registry_of

TOKENS = list(range(100, 140))  # 5 chunks
OTHERS = [token + 1000 for token in TOKENS]


async def store(rig, engine, tokens=TOKENS):
    return (await engines.store(rig, engine, tokens)).stored


def keys_of(engine, tokens=TOKENS):
    return [chunk.key for chunk in chunks_of(engine, tokens)]


def alone(keys):
    return [[key] for key in keys]


def tiers_of(engine):
    return [stacked.tier for stacked in engine._parts.stack.tiers]


async def test_a_lookup_returns_the_number_of_pinned_chunks():
    rig = Rig(slabs=32)
    async with rig.open() as engine:
        await store(rig, engine)
        keys = keys_of(engine)

        assert (await engine.lookup_keys(keys)).pinned == 0
        assert engine.statistics().pinned_chunks == 0
        result = await engine.lookup_keys(keys, lookup_id="a")
        assert (result.count, result.pinned, dict(result.by_tier)) == (5, 5, {"cpu": 5})
        assert engine.statistics().pinned_chunks == 5
        engine.unpin("a")
        assert engine.statistics().pinned_chunks == 0


async def test_a_lookup_in_memory_finds_the_same_and_pins_nothing():
    rig = Rig(slabs=32)
    async with rig.open() as engine:
        await store(rig, engine)
        keys, others = keys_of(engine), keys_of(engine, OTHERS)
        memory = engine.memory_lookup()

        assert await memory.lookup_keys(keys) == replace(await engine.lookup_keys(keys), pinned=5)
        assert (await memory.lookup_keys([*keys[:2], *others])).count == 2
        assert await memory.lookup_keys(others) == await engine.lookup_keys(others)
        assert await memory.first_present([others, [*keys[:1], *others], keys[:2]]) == FirstPresent(
            2, 2, "cpu"
        )
        assert await memory.first_present([others]) is None
        assert engine.statistics().pinned_chunks == 0


@pytest.mark.parametrize(
    ("tiers", "certain"),
    [(["cpu"], True), (["cpu", "disk"], True), (["cpu", "dict"], False), (["dict"], False)],
)
async def test_a_miss_in_memory_is_certain_if_all_other_tiers_know_what_they_lack(tiers, certain, tmp_path):
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": "1MiB"}
    made = [disk if name == "disk" else name for name in tiers]
    async with Rig().open(tiers=made, registry=Made().registry) as engine:
        lookups = [engine.memory_lookup() for _ in range(2)]

        await lookups[0].lookup_keys(keys_of(engine, OTHERS))
        await lookups[1].first_present([keys_of(engine, OTHERS)])

        assert [lookup.certain for lookup in lookups] == [certain, certain]


async def test_a_miss_in_memory_of_a_chunk_on_disk_is_not_certain(tmp_path):
    rig = Rig(slabs=32)
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": "1MiB"}
    async with rig.open(tiers=["cpu", disk]) as engine:
        await store(rig, engine)
        keys, others = keys_of(engine), keys_of(engine, OTHERS)
    async with rig.open(tiers=["cpu", disk]) as engine:
        for look_up, certain in (
            (lambda memory: memory.lookup_keys(keys), False),
            (lambda memory: memory.lookup_keys([*others, *keys]), True),
            (lambda memory: memory.first_present([others, keys]), False),
            (lambda memory: memory.first_present([[*keys[:1], *others]]), False),
        ):
            memory = engine.memory_lookup()
            await look_up(memory)
            assert memory.certain is certain
        assert (await engine.lookup_keys(keys)).count == len(keys)


async def test_no_more_is_pinned_than_there_is_room_for():
    rig = Rig(slabs=16)
    async with rig.open(**{"vllm.max_pinned_fraction": 0.25}) as engine:
        await store(rig, engine)
        keys = keys_of(engine)

        first = await engine.lookup_keys(keys[:3], lookup_id="a")
        second = await engine.lookup_keys(keys, lookup_id="b")

        assert (first.count, first.pinned, second.count, second.pinned) == (3, 3, 5, 1)
        assert await engine.first_present(alone(keys), lookup_id="c") == FirstPresent(0, 0, "cpu")
        engine.unpin("a")
        assert await engine.first_present(alone(keys), lookup_id="c") == FirstPresent(0, 1, "cpu")


@pytest.mark.parametrize(("tokens", "found"), [(TOKENS, 2), (OTHERS, 0)])
async def test_a_second_lookup_of_the_same_id_ends_the_former_pin(tokens, found):
    rig = Rig()
    async with rig.open() as engine:
        await store(rig, engine)
        await engine.lookup_keys(keys_of(engine), lookup_id="a")

        result = await engine.lookup_keys(keys_of(engine, tokens)[:2], lookup_id="a")

        assert (result.count, result.pinned, engine.statistics().pinned_chunks) == (found,) * 3


async def test_a_second_lookup_of_the_same_id_without_an_answer_ends_the_former_pin():
    rig, made = Rig(), Made(ParkingTier)
    settings = {"tiers": ["cpu", "dict"], "retrieve.timeout_s": 0.05}
    async with rig.open(registry=made.registry, **settings) as engine:
        await store(rig, engine)
        await engine.lookup_keys(keys_of(engine), lookup_id="a")
        made.tier.close_gate("contains")

        result = await engine.lookup_keys(keys_of(engine, OTHERS), lookup_id="a")

        assert (result.count, engine.statistics().pinned_chunks) == (0, 0)
        made.tier.open_gate()


async def test_chunks_in_a_slower_tier_only_are_found_but_not_pinned():
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await store(rig, engine)
        keys = keys_of(engine)
        for key in keys[1::2]:
            await tiers_of(engine)[0].remove(key)

        result = await engine.lookup_keys(keys, lookup_id="a")

        assert (result.count, result.pinned, dict(result.by_tier)) == (5, 3, {"cpu": 3, "dict": 2})
        assert engine.statistics().pinned_chunks == 3
        assert await engine.first_present(alone(keys[1:]), lookup_id="b") == FirstPresent(0, 0, "dict")
        assert engine.statistics().pinned_chunks == 3


async def test_first_present_is_the_first_that_any_tier_has():
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await store(rig, engine)
        keys, strangers = keys_of(engine), keys_of(engine, OTHERS)
        await tiers_of(engine)[0].remove(keys[0])

        assert await engine.first_present(alone([*strangers, *keys])) == FirstPresent(5, 0, "dict")
        assert await engine.first_present(alone([strangers[0], *keys[1:]])) == FirstPresent(1, 0, "cpu")
        assert await engine.first_present(alone([strangers[0], *keys[1:]]), lookup_id="a") == FirstPresent(
            1, 1, "cpu"
        )
        assert await engine.first_present(alone(strangers), lookup_id="a") is None
        assert await engine.first_present([], lookup_id="a") is None
        assert engine.statistics().pinned_chunks == 1


async def test_first_present_pins_beside_the_former_pin_and_unpin_ends_both():
    rig = Rig(slabs=6)
    async with rig.open(**{"vllm.max_pinned_fraction": 1.0}) as engine:
        assert await store(rig, engine) == 5
        tail = list(range(8))
        assert await store(rig, engine, tail) == 1
        keys = keys_of(engine)
        await engine.lookup_keys(keys, lookup_id="a")

        assert await engine.first_present(alone(keys_of(engine, tail)), lookup_id="a") == FirstPresent(
            0, 1, "cpu"
        )
        assert engine.statistics().pinned_chunks == 6
        assert await store(rig, engine, OTHERS) == 0  # pinned chunks may not be evicted for these
        assert (await engine.lookup_keys([*keys, *keys_of(engine, tail)])).count == 6
        engine.unpin("a")
        assert engine.statistics().pinned_chunks == 0
        assert await store(rig, engine, OTHERS) == 5


async def test_a_run_of_keys_is_present_only_if_all_of_it_is():
    rig, made = Rig(), Made()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await store(rig, engine)
        keys, strangers = keys_of(engine), keys_of(engine, OTHERS)
        await tiers_of(engine)[0].remove(keys[1])
        runs = [[strangers[0], keys[0]], [keys[0], strangers[0]], keys[:3], keys[3:]]

        assert await engine.first_present(runs, lookup_id="a") == FirstPresent(2, 2, "cpu")
        assert engine.statistics().pinned_chunks == 2  # the third is in the slower tier only
        assert await engine.first_present(runs[:2], lookup_id="a") is None
        engine.unpin("a")
        assert engine.statistics().pinned_chunks == 0


class CountingTier(ForwardingTier):
    """Counts the queries that run at the same time."""

    running = most = 0

    async def contains_many(self, keys):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return await super().contains_many(keys)


async def test_all_runs_but_the_first_are_queried_at_the_same_time():
    rig, made = Rig(), Made(CountingTier)
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await store(rig, engine)
        keys, strangers = keys_of(engine), keys_of(engine, OTHERS)
        await tiers_of(engine)[0].remove(keys[0])

        assert await engine.first_present(alone([*strangers[:4], keys[0]])) == FirstPresent(4, 0, "dict")
        assert made.tier.most == 4


HANGS = {"contains": hang, "contains_many": hang, "count_prefix": hang}


def with_a_tier_that_hangs(*, timeout_s=0.1, store_timeout_s=0.1, **members):
    """Return arguments of `Rig.open`: host memory, and a tier whose methods never answer."""
    tier = altered(capabilities=Capabilities(removes=True, lists=True, persistent=True), **members)
    return {
        "tiers": ["cpu", {"name": "slow"}],
        "registry": registry_of(slow=tier),
        "retrieve.timeout_s": timeout_s,
        "store.timeout_s": store_timeout_s,
        "shutdown_timeout_s": 0.1,
    }


def test_a_tier_that_never_answers_does_not_hide_chunks_in_host_memory():
    async def check():
        rig = Rig(slabs=32)
        async with rig.open(**with_a_tier_that_hangs(**HANGS)) as engine:
            report = await engines.store(rig, engine, TOKENS)
            keys = keys_of(engine)

            result = await engine.lookup_keys([*keys, ChunkKey(bytes(16))], lookup_id="a")

            assert (report.stored, result.count, result.pinned) == (5, 5, 5)
            assert await engine.first_present([[ChunkKey(bytes(16))], keys]) == FirstPresent(1, 0, "cpu")
            loaded = await engine.retrieve([*TOKENS, *range(8)], range(48))
            assert int(loaded.sum()) == 40

    simulation.run(check)  # in virtual time


@pytest.mark.parametrize(
    ("circuit", "members"),
    [("lookup", HANGS), ("read", {"get": hang, "get_many": hang, "store_timeout_s": 8.0})],
)
def test_a_tier_that_uses_up_the_time_of_its_requests_is_suspended(circuit, members):
    """Without a breaker, every request would take as long as the tier that hangs."""

    async def check():
        rig = Rig(slabs=32)
        async with rig.open(**with_a_tier_that_hangs(timeout_s=0.5, **members)) as engine:
            await engines.store(rig, engine, TOKENS)
            await engine.clear(memory_only=True)
            requests = 0
            while _state(engine, circuit) is not CircuitState.OPEN:
                assert requests < 20
                await engine.retrieve(TOKENS, range(40))
                requests += 1

    simulation.run(check)  # in virtual time


def _state(engine, circuit):
    statistics = engine.statistics().layers["slow"].values()
    (breaker,) = (one for one in statistics if isinstance(one, BreakerStatistics))
    return getattr(breaker, circuit).state


@pytest.mark.parametrize(
    ("tiers", "settings", "chunks"),
    [
        (["cpu", "dict"], {}, 5),
        ([{"name": "cpu", "max_bytes": 2 * 8192}, "dict"], {}, 2),
        (["cpu", "dict"], {"retrieve.promote": False}, 0),
        (["dict"], {}, 0),
    ],
)
async def test_a_prefetch_returns_the_tokens_that_are_in_host_memory(tiers, settings, chunks):
    rig, made = Rig(slabs=32), Made()
    async with rig.open(tiers=tiers, registry=made.registry, **settings) as engine:
        await engines.store(rig, engine, TOKENS)
        await engine.flush(timeout_s=60)
        await engine.clear(memory_only=True)

        assert await engine.prefetch(TOKENS) <= 8 * chunks
        memory = engine.statistics().tiers.get("cpu")
        assert (memory.chunks if memory else 0) == chunks


def test_an_engine_without_time_to_close_abandons_a_tier_that_does_not_close(caplog):
    async def check():
        closes = altered(__aexit__=hang)
        async with Rig().open(tiers=["cpu", "slow"], registry=registry_of(slow=closes), shutdown_timeout_s=0):
            pass
        assert "did not close within 0.1 s" in caplog.text

    simulation.run(check)  # in virtual time


def test_a_tier_that_works_closes_without_a_warning_if_there_is_no_time_for_its_queue(caplog):
    async def check():
        async with Rig().open(tiers=["cpu", "dict"], registry=Made().registry, shutdown_timeout_s=0):
            pass
        assert "did not close" not in caplog.text

    simulation.run(check)  # in virtual time
