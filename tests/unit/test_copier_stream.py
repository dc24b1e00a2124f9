"""Rings of parts and reapers of events, without a device."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lmcache_async.device.stream import Reaper, Ring
from lmcache_async.errors import EngineClosedError
from tests.support.fake_streams import FakeEvent


def open_gate():
    gate = threading.Event()
    gate.set()
    return gate


async def until_waiting(ring, count):
    while ring.statistics().waiting != count:
        await asyncio.sleep(0)


async def test_a_ring_lends_each_part_once_and_serves_waiters_in_order():
    ring = Ring(["a", "b"])
    held = [await ring.acquire(), await ring.acquire()]
    first = asyncio.ensure_future(ring.acquire())
    await until_waiting(ring, 1)
    second = asyncio.ensure_future(ring.acquire())
    await until_waiting(ring, 2)

    ring.release(held[1])
    ring.release(held[0])

    assert [await first, await second] == ["b", "a"]
    assert (ring.statistics().free, ring.statistics().waited) == (0, 2)


async def test_a_newcomer_does_not_overtake_waiters():
    ring = Ring(["a"])
    part = await ring.acquire()
    first = asyncio.ensure_future(ring.acquire())
    await until_waiting(ring, 1)
    ring.release(part)

    second = asyncio.ensure_future(ring.acquire())
    await asyncio.sleep(0)

    assert await first == "a"
    assert not second.done()
    ring.release("a")
    assert await second == "a"


async def test_a_cancelled_waiter_takes_no_part():
    ring = Ring(["a"])
    part = await ring.acquire()
    waiting = asyncio.ensure_future(ring.acquire())
    await until_waiting(ring, 1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ring.release(part)

    assert (ring.statistics().free, ring.statistics().waiting) == (1, 0)


async def test_a_waiter_cancelled_when_its_part_is_already_there_gives_it_on():
    ring = Ring(["a"])
    part = await ring.acquire()
    waiting = asyncio.ensure_future(ring.acquire())
    await until_waiting(ring, 1)
    ring.release(part)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert ring.statistics().free == 1


async def test_futures_end_when_their_events_pass_and_on_passed_runs_first():
    reaper, gate, order = Reaper("reaper"), threading.Event(), []
    early = reaper.watch(FakeEvent(open_gate()), lambda: order.append("early"))
    late = reaper.watch(FakeEvent(gate), lambda: order.append("late"))

    await early
    assert order == ["early"]
    assert not late.done()
    gate.set()
    await late
    reaper.close()

    assert order == ["early", "late"]


async def test_a_failed_event_is_raised_to_its_awaiter_alone():
    reaper, passed = Reaper("reaper"), []
    bad = reaper.watch(FakeEvent(open_gate(), RuntimeError("device lost")), lambda: passed.append(1))
    good = reaper.watch(FakeEvent(open_gate()), lambda: passed.append(2))

    with pytest.raises(RuntimeError, match="device lost"):
        await bad
    await good
    reaper.close()

    assert passed == [1, 2]


async def test_a_cancelled_future_is_still_passed_on():
    reaper, gate, passed = Reaper("reaper"), threading.Event(), asyncio.Event()
    future = reaper.watch(FakeEvent(gate), passed.set)

    future.cancel()
    gate.set()
    await passed.wait()
    reaper.close()


async def test_close_waits_for_every_event_and_then_refuses():
    reaper = Reaper("reaper")
    events = [FakeEvent(open_gate()) for _ in range(3)]
    futures = [reaper.watch(event, lambda: None) for event in events]

    reaper.close()
    reaper.close()

    assert all(event.noticed for event in events)
    await asyncio.gather(*futures)
    with pytest.raises(EngineClosedError):
        reaper.watch(FakeEvent(open_gate()), lambda: None)


def test_a_loop_that_was_closed_meanwhile_does_not_end_the_reaper():
    reaper, gate = Reaper("reaper"), threading.Event()
    events = [FakeEvent(gate), FakeEvent(open_gate())]

    async def watch():
        for event in events:
            reaper.watch(event, lambda: None)

    asyncio.run(watch())
    gate.set()
    reaper.close()

    assert [event.noticed for event in events] == [True, True]
