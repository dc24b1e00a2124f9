"""Cancellation of a call at every await: leases are released, and the engine continues to work."""

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch

from lmcache_async.errors import EngineClosedError
from lmcache_async.pipeline.batch import StoreRequest
from lmcache_async.testing.rig import Rig
from lmcache_async.testing.steps import turns
from tests.support.engines import chunks_of
from tests.support.tiers import Made, ParkingTier

TOKENS = list(range(100, 140))  # 5 chunks of 8
OTHERS = [token + 1000 for token in TOKENS]


def leases(engine):
    """Number of leased slabs, except those in the traceback of a cancelled task: see the last test."""
    statistics = engine._parts.arena.statistics()
    return statistics.leased_slabs - statistics.lingering_slabs


class Opened:
    """An engine with a memory tier and a ParkingTier, with TOKENS stored."""

    def __init__(self, *, tiers=("cpu", "dict"), **settings):
        self.made = Made(ParkingTier)
        self.rig = Rig()
        self.context = self.rig.open(registry=self.made.registry, tiers=list(tiers), **settings)

    async def __aenter__(self):
        self.engine = await self.context.__aenter__()
        self.tier = self.made.tier
        await self.store(TOKENS)
        return self

    async def __aexit__(self, *error):
        self.tier.open_gate()
        await self.context.__aexit__(*error)

    def store(self, tokens):
        self.rig.write(range(len(tokens)), self.rig.content(tokens))
        return self.engine.store(tokens, range(len(tokens)))

    async def settle(self):
        """Wait until abandoned calls have ended; the remaining leases belong to the tiers."""
        while self.engine.statistics().late_calls:
            await asyncio.sleep(0)
        assert await self.engine.flush(timeout_s=60)
        statistics = self.engine.statistics()
        kept = statistics.tiers["cpu"].chunks if "cpu" in statistics.tiers else 0
        assert leases(self.engine) == kept
        assert (statistics.running, statistics.pinned_chunks) == (0, 0)
        assert all(writer.queued_chunks == writer.queued_bytes == 0 for writer in statistics.writers.values())

    async def check_works(self, tokens=TOKENS):
        """Check that store, lookup and retrieve still work."""
        await self.store(tokens)
        assert await self.engine.lookup(tokens) == 40
        self.rig.wipe()
        slots = list(range(80, 120))
        assert (await self.engine.retrieve(tokens, slots)).all()
        assert torch.equal(self.rig.read(slots), self.rig.content(tokens))
        await self.settle()


async def cancel(task):
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


def requests(opened):
    engine = opened.engine
    return {
        "store": lambda: opened.store(OTHERS),
        "retrieve": lambda: engine.retrieve(TOKENS, range(40)),
        "prefetch": lambda: engine.prefetch(TOKENS),
        "lookup": lambda: engine.lookup(TOKENS, lookup_id="a"),
        "clear": engine.clear,
    }


PARKED = [
    ("store", "contains"),
    ("store", "put"),
    ("store", "have put"),
    ("retrieve", "contains"),
    ("retrieve", "get"),
    ("retrieve", "got"),
    ("prefetch", "contains"),
    ("prefetch", "get"),
    ("prefetch", "got"),
    ("lookup", "contains"),
    ("clear", "clear"),
]


@pytest.mark.parametrize("stubborn", [False, True], ids=["yields", "stubborn"])
@pytest.mark.parametrize("tiers", [("cpu", "dict"), ("dict",)], ids=["memory and slow", "slow alone"])
@pytest.mark.parametrize(("verb", "parks_at"), PARKED)
async def test_a_call_cancelled_while_a_tier_is_parked_leaves_nothing(verb, parks_at, tiers, stubborn):
    async with Opened(tiers=tiers) as opened:
        await opened.engine.clear(memory_only=True)
        opened.tier.stubborn = stubborn
        opened.tier.close_gate(parks_at)
        task = asyncio.ensure_future(requests(opened)[verb]())
        await opened.tier.parked.wait()
        await cancel(task)
        opened.tier.open_gate()

        await opened.settle()
        await opened.check_works(OTHERS)
        await opened.check_works()


@pytest.mark.parametrize("verb", ["store", "retrieve", "prefetch", "clear"])
@pytest.mark.parametrize("steps", range(12))
async def test_a_call_cancelled_at_any_of_its_first_steps_leaves_nothing(verb, steps):
    async with Opened() as opened:
        await opened.engine.clear(memory_only=True)
        task = asyncio.ensure_future(requests(opened)[verb]())
        await turns(steps)
        task.cancel()
        await asyncio.wait({task})

        await opened.settle()
        await opened.check_works(OTHERS)


@pytest.mark.parametrize("waits_for", ["put", "get"])
async def test_a_clear_cancelled_while_it_waits_for_others_clears_nothing(waits_for):
    async with Opened() as opened:
        await opened.engine.clear(memory_only=True)
        opened.tier.close_gate(waits_for)
        verb = "store" if waits_for == "put" else "retrieve"
        other = asyncio.ensure_future(requests(opened)[verb]())
        await opened.tier.parked.wait()
        clear = asyncio.ensure_future(opened.engine.clear())
        await turns(5)
        await cancel(clear)
        opened.tier.open_gate()
        await other

        assert await opened.engine.lookup(TOKENS) == 40
        await opened.settle()


async def test_a_store_that_waits_for_memory_is_cancelled_and_gives_its_place_up():
    async with Opened(**{"store.allocate_timeout_s": 60, "vllm.max_pinned_fraction": 1.0}) as opened:
        arena = opened.engine._parts.arena
        await opened.engine.clear(memory_only=True)
        taken = [arena.lease_nowait(10) for _ in range(arena.num_slabs)]
        task = asyncio.ensure_future(opened.store(OTHERS))
        while not arena.statistics().waiting:
            await asyncio.sleep(0)
        await cancel(task)
        assert arena.statistics().waiting == 0
        for buffer in taken:
            buffer.release()

        await opened.settle()
        await opened.check_works(OTHERS)


async def test_of_many_calls_at_once_only_those_cancelled_end():
    async with Opened() as opened:
        await opened.engine.clear(memory_only=True)
        opened.tier.close_gate("get")
        tasks = [asyncio.ensure_future(opened.engine.retrieve(TOKENS, range(40))) for _ in range(4)]
        await opened.tier.parked.wait()
        await turns(20)
        for task in tasks[::2]:
            await cancel(task)
        opened.tier.open_gate()

        for task in tasks[1::2]:
            assert (await task).all()
        await opened.settle()


# Device memory.


class Copy:
    """Blocks the copy in its thread, like a copy that is in progress."""

    def __init__(self, engine, monkeypatch):
        self.running, self.go_on, self.ended = threading.Event(), threading.Event(), False
        real = engine.copier._copy

        def slow(*arguments, **kwargs):
            self.running.set()
            assert self.go_on.wait(60)
            real(*arguments, **kwargs)
            self.ended = True

        monkeypatch.setattr(engine.copier._threads, "queue", None)  # copies by Python
        monkeypatch.setattr(engine.copier, "_copy", slow)

    async def wait_running(self):
        while not self.running.is_set():
            await asyncio.sleep(0)


def store_request(opened, on_copied):
    opened.rig.write(range(40), opened.rig.content(OTHERS))
    chunks = chunks_of(opened.engine, OTHERS)
    rows = tuple(np.arange(chunk.start, chunk.stop) for chunk in chunks)
    return StoreRequest(chunks=chunks, rows=rows, on_copied=on_copied)


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_device_memory_is_not_free_before_a_running_copy_has_ended(monkeypatch, times):
    async with Opened() as opened:
        copy, told = Copy(opened.engine, monkeypatch), []
        request = store_request(opened, lambda: told.append(copy.ended))
        task = asyncio.ensure_future(opened.engine.store_chunks(request))
        await copy.wait_running()
        for _ in range(times):  # a caller that cancels repeatedly
            task.cancel()
            await turns(5)
        assert told == []
        copy.go_on.set()
        while not told:
            await asyncio.sleep(0)
        await asyncio.wait({task})
        await turns(5)

        assert told == [True]
        assert task.cancelled()
        await opened.settle()


async def test_a_load_is_not_over_before_a_running_copy_has_ended(monkeypatch):
    async with Opened() as opened:
        copy = Copy(opened.engine, monkeypatch)
        task = asyncio.ensure_future(opened.engine.retrieve(TOKENS, range(40)))
        await copy.wait_running()
        task.cancel()
        await turns(20)
        assert not task.done()
        copy.go_on.set()
        await asyncio.wait({task})

        assert copy.ended
        assert task.cancelled()
        await opened.settle()


@pytest.mark.parametrize("steps", range(8))
async def test_device_memory_is_reported_free_exactly_once_wherever_a_store_is_cancelled(steps):
    async with Opened() as opened:
        told = []
        request = store_request(opened, lambda: told.append(True))
        task = asyncio.ensure_future(opened.engine.store_chunks(request))
        await turns(1 + steps)
        task.cancel()
        await asyncio.wait({task})

        assert told == [True]
        await opened.settle()


# Closing.


@pytest.mark.parametrize(
    ("verb", "parks_at"), [("store", "put"), ("retrieve", "get"), ("prefetch", "get"), ("lookup", "contains")]
)
async def test_closing_during_a_call_ends_it_and_gives_every_lease_back(verb, parks_at):
    async with Opened(shutdown_timeout_s=0.02) as opened:
        await opened.engine.clear(memory_only=True)
        opened.tier.close_gate(parks_at)
        task = asyncio.ensure_future(requests(opened)[verb]())
        await opened.tier.parked.wait()
        await opened.context.__aexit__(None, None, None)
        opened.tier.open_gate()
        await asyncio.wait({task})

        assert not task.cancelled(), "the caller was not cancelled"
        assert task.exception() is None or isinstance(task.exception(), EngineClosedError)
        await turns(5)
        assert leases(opened.engine) == 0
        opened.context = Rig().open()  # for the exit of the block
        await opened.context.__aenter__()


async def test_a_clear_that_waits_for_a_write_while_the_engine_closes_is_told_that_it_is_closed():
    async with Opened(shutdown_timeout_s=0.02) as opened:
        opened.tier.close_gate("put")
        storing = asyncio.ensure_future(opened.store(OTHERS))
        await opened.tier.parked.wait()
        clearing = asyncio.ensure_future(opened.engine.clear())
        await turns(5)
        await opened.context.__aexit__(None, None, None)
        opened.tier.open_gate()
        await asyncio.wait({storing, clearing})

        assert isinstance(storing.exception(), EngineClosedError)
        assert isinstance(clearing.exception(), EngineClosedError)
        opened.context = Rig().open()
        await opened.context.__aenter__()


async def test_closing_tells_that_device_memory_is_free():
    async with Opened(shutdown_timeout_s=0.02) as opened:
        with_room = asyncio.Event()
        request = store_request(opened, with_room.set)
        await opened.context.__aexit__(None, None, None)
        with pytest.raises(EngineClosedError):
            await opened.engine.store_chunks(request)

        assert with_room.is_set()
        opened.context = Rig().open()
        await opened.context.__aenter__()


@pytest.mark.parametrize("steps", range(10))
async def test_a_closing_cancelled_at_any_step_still_frees_everything(steps):
    made, rig = Made(ParkingTier), Rig()
    context = rig.open(registry=made.registry, tiers=["cpu", "dict"], shutdown_timeout_s=60)
    engine = await context.__aenter__()
    rig.write(range(40), rig.content(TOKENS))
    made.tier.close_gate("put")
    storing = asyncio.ensure_future(engine.store(TOKENS, range(40)))
    await made.tier.parked.wait()
    while engine.statistics().tiers["cpu"].chunks < 5:
        await asyncio.sleep(0)
    assert await engine.lookup(TOKENS, lookup_id="a") == 40
    close = asyncio.ensure_future(context.__aexit__(None, None, None))
    await turns(1 + steps)
    close.cancel()
    await asyncio.wait({close, storing})

    assert close.done()
    assert isinstance(storing.exception(), EngineClosedError | None)
    await turns(20)
    assert leases(engine) == 0
    assert not any(thread.name.startswith("lmcache-async-work") for thread in threading.enumerate())
    with pytest.raises(EngineClosedError):
        await engine.lookup(TOKENS)


@pytest.mark.parametrize("verb", ["store", "retrieve"])
async def test_no_slab_is_lost_to_the_traceback_of_a_cancelled_call(verb):
    async with Opened() as opened:
        await opened.engine.clear(memory_only=True)
        kept = []
        for steps in range(2, 12):
            task = asyncio.ensure_future(requests(opened)[verb]())
            await turns(steps)
            task.cancel()
            await asyncio.wait({task})
            kept.append(task)  # a reference to the task, as its caller would keep, and to its traceback
        await opened.settle()
        gc.collect()

        assert opened.engine.statistics().arena.lingering_slabs == 0
        assert len(kept) == 10
