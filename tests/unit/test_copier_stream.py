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
