"""Lanes: parts in turn, and futures of device events, without a device."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from lmcache_async.device.cuda import Lane, LaneStatistics
from lmcache_async.errors import EngineClosedError
from lmcache_async.testing.steps import turns
from tests.support.fake_streams import FakeEvent

GATE = threading.Event()
GATE.set()


@pytest.fixture
def lane():
    lane = Lane("lane", ["a"])
    yield lane
    lane.close()


async def waiter(lane):
    task = asyncio.ensure_future(lane.acquire())
    await turns(1)
    return task


async def test_parts_are_given_to_waiters_in_order(lane):
    held = await lane.acquire()
    waiters = [await waiter(lane), await waiter(lane)]
    assert (lane.statistics().free, lane.statistics().waiting) == (0, 2)

    lane.release(held)
    waiters.append(await waiter(lane))
    for task in waiters:
        assert not any(later.done() for later in waiters[waiters.index(task) + 1 :])
        lane.release(await task)

    assert lane.statistics() == LaneStatistics(parts=1, free=1, waiting=0, waited=3)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_waiter_takes_no_part_also_if_one_was_granted(lane, granted):
    held = await lane.acquire()
    waiting = await waiter(lane)
    if granted:
        lane.release(held)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not granted:
        lane.release(held)

    assert (lane.statistics().free, lane.statistics().waiting) == (1, 0)


async def test_a_part_is_free_when_the_future_of_its_event_ends():
    lane, gate = Lane("lane", ["a", "b"]), threading.Event()
    early = lane.watch(await lane.acquire(), FakeEvent(GATE))
    late = lane.watch(await lane.acquire(), FakeEvent(gate))

    await early
    assert lane.statistics().free == 1
    assert not late.done()
    gate.set()
    await late

    assert lane.statistics().free == 2
    lane.close()


async def test_a_failed_event_is_raised_to_its_awaiter_alone(lane):
    bad = lane.watch(await lane.acquire(), FakeEvent(GATE, RuntimeError("device lost")))
    good = lane.watch(await lane.acquire(), FakeEvent(GATE))

    with pytest.raises(RuntimeError, match="device lost"):
        await bad
    await good
    assert lane.statistics().free == 1


async def test_the_part_of_a_cancelled_future_becomes_free_after_its_event(lane):
    gate = threading.Event()
    future = lane.watch(await lane.acquire(), FakeEvent(gate))

    future.cancel()
    await turns(3)
    assert lane.statistics().free == 0
    gate.set()
    assert await lane.acquire() == "a"


async def test_close_waits_for_every_event_and_then_refuses():
    lane = Lane("lane", ["a", "b", "c"])
    events = [FakeEvent(GATE) for _ in range(3)]
    futures = [lane.watch(await lane.acquire(), event) for event in events]

    lane.close()
    lane.close()

    assert all(event.noticed for event in events)
    await asyncio.gather(*futures)
    with pytest.raises(EngineClosedError):
        lane.watch("a", FakeEvent(GATE))


@pytest.mark.parametrize(
    "prepare", [contextlib.nullcontext, lambda: 1 // 0], ids=["prepared", "not prepared"]
)
def test_events_are_awaited_also_after_a_closed_loop_and_a_failed_preparation(prepare):
    lane, gate = Lane("lane", ["a", "b"], prepare), threading.Event()
    events = [FakeEvent(gate), FakeEvent(GATE)]

    async def watch():
        for event in events:
            lane.watch(await lane.acquire(), event)

    asyncio.run(watch())
    gate.set()
    lane.close()

    assert [event.noticed for event in events] == [True, True]
