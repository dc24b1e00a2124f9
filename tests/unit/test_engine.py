"""The engine over real tiers and host tensors."""

import asyncio
import re
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_async.device import open_copiers
from lmcache_async.device.cuda import open_cuda_copiers
from lmcache_async.device.movers import TorchMover
from lmcache_async.hashing.namespace import namespace_id
from lmcache_async.memory.threads import DESCRIPTORS, WorkerPool
from lmcache_async.pipeline.batch import StoreRequest
from lmcache_async.testing.fakes import GatedTier
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import turns
from tests.simulation import loop as simulation
from tests.support import engines, forked_python
from tests.support.engines import chunks_of, leased
from tests.support.fake_streams import FakeStreams
from tests.support.tiers import Made, ParkingTier, altered, hang, registry_of

ROOT = Path(__file__).parents[2]
TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8


def disk(tmp_path, **options):
    return {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB", **options}


async def store(rig, engine, tokens=TOKENS, **options):
    return await engines.store(rig, engine, tokens, **options)


async def check_retrieve(rig, engine, tokens=TOKENS, *, expected, **options):
    assert await engines.retrieve(rig, engine, tokens, **options) == expected


async def test_stored_chunks_are_restored_bit_by_bit_and_other_memory_is_unchanged():
    rig = Rig()
    async with rig.open() as engine:
        report = await store(rig, engine)

        assert (report.stored, report.present, report.tokens) == (5, 0, 40)
        assert await engine.lookup(TOKENS) == 40
        await check_retrieve(rig, engine, expected=[True] * 40)
        assert leased(engine) == 0


async def test_a_second_store_moves_only_new_chunks():
    rig = Rig()
    async with rig.open() as engine:
        await store(rig, engine, TOKENS[:24])
        report = await store(rig, engine)

        assert (report.stored, report.present) == (2, 3)


async def test_leading_false_tokens_of_the_mask_are_not_stored():
    rig = Rig()
    mask = torch.ones(40, dtype=torch.bool)
    mask[:16] = False
    async with rig.open() as engine:
        report = await store(rig, engine, mask=mask)

        assert report.stored == 3
        assert report.dropped["masked"] == 2
        assert await engine.lookup(TOKENS) == 0


async def test_the_mask_of_a_retrieve_is_on_the_cpu_whatever_the_default_device():
    rig = Rig()
    async with rig.open() as engine:
        await store(rig, engine)
        with torch.device("meta"):
            mask = await engine.retrieve(TOKENS, range(40))

        assert mask.device.type == "cpu"
        assert mask.all()


async def test_disk_serves_after_a_restart_and_another_model_finds_nothing(tmp_path):
    async with Rig().open(tiers=["cpu", disk(tmp_path)]) as engine:
        await store(rig := Rig(), engine)  # slots of another cache: nothing useful is stored
    rig = Rig()
    async with rig.open(tiers=["cpu", disk(tmp_path)]) as engine:
        await engine.clear()
        await store(rig, engine)
    again = Rig()
    async with again.open(tiers=["cpu", disk(tmp_path)]) as engine:
        assert await engine.lookup(TOKENS) == 40
        await check_retrieve(again, engine, expected=[True] * 40)
        assert engine.statistics().tiers["cpu"].chunks == 5  # promoted
    other = Rig(model="other")
    async with other.open(tiers=["cpu", disk(tmp_path)]) as engine:
        assert await engine.lookup(TOKENS) == 0


async def test_without_a_copy_thread_a_store_is_dropped_and_a_load_is_a_miss(monkeypatch):
    def refuse(*args):
        raise RuntimeError("can't start new thread")

    rig = Rig()
    async with rig.open() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            report = await store(rig, engine)
        assert (report.stored, dict(report.dropped)) == (0, {"error": 5})
        assert leased(engine) == 0

        await store(rig, engine)
        await check_retrieve(rig, engine, expected=[True] * 40)
        copier = engine.copier
        with monkeypatch.context() as patch, WorkerPool(1) as without_threads:
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr(copier._threads, "pool", without_threads)
            patch.setattr(copier._threads, "queue", None)
            assert not (await engine.retrieve(TOKENS, range(40))).any()
        assert leased(engine) == 0
        await check_retrieve(rig, engine, expected=[True] * 40)


async def test_a_prompt_larger_than_memory_stores_its_prefix():
    rig = Rig(slabs=3)
    async with rig.open() as engine:
        report = await store(rig, engine)

        assert report.stored == 3
        assert report.dropped["larger_than_memory"] == 2
        await check_retrieve(rig, engine, expected=[True] * 24 + [False] * 16)


def test_lookups_of_a_silent_tier_end_at_the_deadline_of_the_retrieve():
    async def check():
        silent = altered(contains=hang, count_prefix=hang, contains_many=hang)
        settings = {"tiers": ["cpu", "silent"], "retrieve.timeout_s": 1.0}
        async with Rig().open(registry=registry_of(silent=silent), **settings) as engine:
            keys = [chunk.key for chunk in chunks_of(engine, TOKENS)]
            start = asyncio.get_running_loop().time()
            assert (await engine.lookup_keys(keys)).count == 0
            assert await engine.first_present([keys]) is None
            return asyncio.get_running_loop().time() - start

    assert simulation.run(check) < 3  # virtual seconds; a call to the tier may take 30


async def test_device_memory_is_free_before_a_slow_tier_has_written():
    made, rig = Made(GatedTier), Rig()
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        copied = asyncio.Event()
        rig.write(range(40), rig.content(TOKENS))
        chunks = chunks_of(engine, TOKENS)
        rows = tuple(np.arange(c.start, c.stop) for c in chunks)
        task = asyncio.ensure_future(
            engine.store_chunks(StoreRequest(chunks=chunks, rows=rows, on_copied=copied.set))
        )
        await copied.wait()
        await made.tier.parked.wait()

        while engine.statistics().tiers["cpu"].chunks < 5:
            await asyncio.sleep(0)

        assert not task.done()
        await check_retrieve(rig, engine, expected=[True] * 40)  # memory serves already
        made.tier.open_gate()
        assert (await task).stored == 5


async def test_prefetch_brings_chunks_into_memory(tmp_path):
    rig = Rig()
    async with rig.open(tiers=["cpu", disk(tmp_path)]) as engine:
        await store(rig, engine)
    async with rig.open(tiers=["cpu", disk(tmp_path)]) as engine:
        assert engine.statistics().tiers["cpu"].chunks == 0
        assert await engine.prefetch(TOKENS) == 40
        assert engine.statistics().tiers["cpu"].chunks == 5
        assert leased(engine) == 0


async def test_nothing_from_before_a_clear_is_promoted_during_it():
    """Otherwise a chunk computed with old weights would be found after vLLM has updated them in place."""
    rig, made = Rig(), Made(ParkingTier)
    async with rig.open(tiers=["cpu", "dict"], registry=made.registry) as engine:
        await store(rig, engine)
        made.tier.close_gate("clear")
        clearing = asyncio.ensure_future(engine.clear())
        await made.tier.parked.wait()  # memory is cleared, the slower tier is not

        assert not (await engine.retrieve(TOKENS, range(40))).any()
        assert await engine.prefetch(TOKENS) == 0
        made.tier.open_gate()
        await clearing

        assert await engine.lookup(TOKENS) == 0
        await store(rig, engine)
        await check_retrieve(rig, engine, expected=[True] * 40)


async def test_the_first_line_names_the_tiers_with_their_content_and_the_namespace(tmp_path, caplog):
    caplog.set_level("INFO", logger="lmcache_async")
    rig = Rig()
    for _ in range(2):
        async with rig.open(tiers=["cpu", disk(tmp_path)]) as engine:
            await store(rig, engine)

    opened = [line for line in caplog.messages if line.startswith("engine open: ")]
    assert len(opened) == 2
    assert "disk (5 records, 0.0 of 0.1 GB); chunks of 8 tokens; namespace " in opened[1]
    assert opened[1].endswith(namespace_id(rig.namespace.text))


async def test_one_line_a_store_and_a_retrieve(caplog):
    rig = Rig()
    caplog.set_level("INFO", logger="lmcache_async")
    async with rig.open() as engine:
        await store(rig, engine, request_id="r1")
        await check_retrieve(rig, engine, expected=[True] * 40, request_id="r2")

    assert re.search(r"stored 40 tokens in 5 chunks .* GB/s.*\[r1\]", caplog.text)
    assert re.search(r"retrieved 40/40 tokens \(cpu=40\), .* ms, .* GB/s \[r2\]", caplog.text)


async def test_gpu_settings_reach_the_copier(monkeypatch):
    given = {}

    def note(layouts, **options):
        given.update(options)
        return open_copiers(layouts, **options)

    monkeypatch.setattr("lmcache_async.engine.builder.open_copiers", note)

    async with Rig().open(**{"gpu.staging_bytes": "1MiB", "gpu.load_priority": "high"}):
        pass

    assert given == {
        "threads": 2,
        "huge_pages": False,
        "staging_bytes": 1 << 20,
        "store_priority": 0,
        "load_priority": -1,
    }


def open_with_fake_streams(rig, streams, monkeypatch, **settings):
    """Open an engine with the GPU copier on the host."""

    def opened(layouts, **_):
        return open_cuda_copiers(layouts, streams=streams, movers=[TorchMover(each) for each in layouts])

    monkeypatch.setattr("lmcache_async.engine.builder.open_copiers", opened)
    return rig.open(**settings)


def closed_fence(engine, streams):
    """Return a fence and the gate that lets the device reach it. Later events are reached at once."""
    gate = streams.close_gate()
    fence = engine.copier.fence()
    streams.close_gate().set()
    return fence, gate


async def test_a_store_ends_when_its_fence_is_reached_while_later_stores_wait_for_theirs(monkeypatch):
    rig, streams = Rig(), FakeStreams()
    bounds = {"store.batch_bytes": rig.slab_bytes, "store.max_in_flight_bytes": 2 * rig.slab_bytes}
    async with open_with_fake_streams(rig, streams, monkeypatch, **bounds) as engine:
        gates, stores = [], []
        for step in range(3):
            fence, gate = closed_fence(engine, streams)
            tokens = [step, *TOKENS[1:]]
            stores.append(asyncio.ensure_future(engine.store(tokens, range(40), fence=fence)))
            gates.append(gate)
        await turns(50)
        assert leased(engine) == 0  # no memory is held while a fence is not reached

        for step, gate in enumerate(gates):
            gate.set()
            assert (await stores[step]).stored == 5
            assert not any(storing.done() for storing in stores[step + 1 :])


async def test_a_load_ends_when_its_fence_is_reached_while_later_loads_wait_for_theirs(tmp_path, monkeypatch):
    rig, streams = Rig(), FakeStreams()
    settings = {
        "tiers": [disk(tmp_path)],
        "retrieve.batch_bytes": rig.slab_bytes,
        "retrieve.max_in_flight_bytes": 2 * rig.slab_bytes,
    }
    async with open_with_fake_streams(rig, streams, monkeypatch, **settings) as engine:
        await store(rig, engine)
        gates, loads = [], []
        for _ in range(3):
            fence, gate = closed_fence(engine, streams)
            loads.append(asyncio.ensure_future(engine.retrieve(TOKENS, range(40), fence=fence)))
            gates.append(gate)

        for step, gate in enumerate(gates):
            gate.set()
            assert (await loads[step]).all()
            assert not any(loading.done() for loading in loads[step + 1 :])


async def test_a_store_whose_fence_is_not_reached_by_its_deadline_is_dropped_and_counted(monkeypatch):
    rig, streams = Rig(), FakeStreams()
    async with open_with_fake_streams(rig, streams, monkeypatch, **{"store.timeout_s": 0.05}) as engine:
        fence, gate = closed_fence(engine, streams)

        report = await engine.store(TOKENS, range(40), mask=[False] * 16 + [True] * 24, fence=fence)
        held = leased(engine)
        gate.set()  # before an assertion can fail, because closing waits for the fence

        assert (report.stored, dict(report.dropped)) == (0, {"masked": 2, "deadline": 3})
        assert held == 0


async def test_a_device_that_fails_before_the_fence_of_a_store_is_an_error_of_that_store(monkeypatch):
    rig, streams = Rig(), FakeStreams()
    async with open_with_fake_streams(rig, streams, monkeypatch) as engine:
        streams.error = RuntimeError("illegal address")
        fence = engine.copier.fence()

        with pytest.raises(ExceptionGroup) as raised:
            await engine.store(TOKENS, range(40), fence=fence)
        assert [str(error) for error in raised.value.exceptions] == ["illegal address"]
        assert leased(engine) == 0


def test_an_engine_has_room_for_file_descriptors_in_advance(tmp_path):
    """Enlarging the kernel's table later takes up to seconds, in the call that opens a file or accepts a connection."""
    script = """
import asyncio, pathlib, re, threading
from lmcache_async.testing.rig import Rig

async def main():
    async with Rig().open():
        for thread in threading.enumerate():
            if thread.name == "lmcache-async-descriptors":
                thread.join()
        print(re.search(r"FDSize:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

asyncio.run(main())
"""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    (tmp_path / "engine.py").write_text(script)

    ended = forked_python.run("engine.py", cwd=tmp_path, path=[ROOT])

    assert ended.status == 0, ended.output
    assert int(ended.output) >= min(DESCRIPTORS, limit)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.store(TOKENS, range(40)),
        lambda engine: engine.retrieve(TOKENS, range(40)),
        lambda engine: engine.lookup(TOKENS),
        lambda engine: engine.first_present([[]]),
        lambda engine: engine.prefetch(TOKENS),
        lambda engine: engine.clear(),
        lambda engine: engine.flush(timeout_s=30),
        lambda engine: engine.scrub(),
    ],
    ids=["store", "retrieve", "lookup", "first_present", "prefetch", "clear", "flush", "scrub"],
)
async def test_a_call_from_another_event_loop_is_refused_and_the_engine_continues(call, tmp_path):
    rig = Rig()
    async with rig.open(tiers=["cpu", disk(tmp_path)]) as engine:
        with pytest.raises(RuntimeError, match="opened on another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(call(engine)))

        assert (await store(rig, engine)).stored == 5
        await check_retrieve(rig, engine, expected=[True] * 40)


@pytest.mark.parametrize("verb", ["store", "retrieve", "prefetch"])
async def test_the_caller_may_change_the_tokens_before_a_thread_hashes_them(verb, monkeypatch):
    rig = Rig()
    thread_starts = asyncio.Event()

    async def in_late_thread(executor, function):
        await thread_starts.wait()
        return function()

    monkeypatch.setattr("lmcache_async.stages.hash.in_thread", in_late_thread)
    async with rig.open() as engine:
        if verb != "store":
            await store(rig, engine)
        monkeypatch.setattr("lmcache_async.stages.hash.HashStage._INLINE_TOKENS", 8)
        tokens = np.array(TOKENS, np.int32)
        rows = () if verb == "prefetch" else (range(40),)
        call = asyncio.ensure_future(getattr(engine, verb)(tokens, *rows))
        await turns(1)

        tokens[:] = 7
        thread_starts.set()
        result = await call

        assert {"store": lambda: result.stored == 5, "retrieve": lambda: result.all()}.get(
            verb, lambda: result == 40
        )()
        assert await engine.lookup(TOKENS) == 40
        assert await engine.lookup(tokens) == 0
