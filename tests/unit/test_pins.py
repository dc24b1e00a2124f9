"""Pins: leases by lookup id, bounded in number and time, all given back."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.engine import lookup as lookup_module
from lmcache_async.engine.lookup import Pins
from lmcache_async.memory.arena import Arena


def new_arena(slabs=16):
    return Arena(slabs * 4096, 4096, prefault=False, huge_pages=False)


@pytest.fixture
def arena():
    arena = new_arena()
    yield arena
    leased = arena.statistics().leased_slabs
    arena.close()
    assert leased == 0, "leases were not given back"


def lease(arena, count):
    return [arena.lease_nowait(10) for _ in range(count)]


class FakeTimer:
    def __init__(self, delay, callback, arguments):
        self.delay, self.callback, self.arguments = delay, callback, arguments
        self.cancelled = False

    def cancel(self):
        self.cancelled = True

    def fire(self):
        assert not self.cancelled
        self.callback(*self.arguments)


class FakeLoop:
    """Timers that go off when the test says so."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay, callback, *arguments):
        self.timers.append(FakeTimer(delay, callback, arguments))
        return self.timers[-1]

    @property
    def due(self):
        return [timer for timer in self.timers if not timer.cancelled]


@pytest.fixture
def loop(monkeypatch):
    loop = FakeLoop()
    monkeypatch.setattr(lookup_module.asyncio, "get_running_loop", lambda: loop)
    return loop


def test_a_pin_holds_its_leases_until_it_is_released(arena, loop):
    pins = Pins(max_buffers=8, ttl_s=30)
    pins.hold("a", lease(arena, 3))
    pins.hold("b", lease(arena, 2))
    assert (pins.count, pins.room, arena.statistics().leased_slabs) == (5, 3, 5)

    pins.release("a")

    assert (pins.count, arena.statistics().leased_slabs) == (2, 2)
    pins.release("a")
    pins.release("never held")
    pins.release("b")
    assert (pins.count, pins.room) == (0, 8)
    assert loop.due == []


def test_a_forgotten_pin_ends_after_its_time(arena, loop):
    pins = Pins(max_buffers=8, ttl_s=30)
    pins.hold("a", lease(arena, 3))
    (timer,) = loop.due
    assert timer.delay == 30

    timer.fire()

    assert (pins.count, arena.statistics().leased_slabs) == (0, 0)


def test_a_pin_taken_again_has_all_leases_and_a_time_of_its_own(arena, loop):
    pins = Pins(max_buffers=8, ttl_s=30)
    assert pins.hold("a", lease(arena, 3)) == 3
    assert pins.hold("a", lease(arena, 2)) == 2

    assert (pins.count, arena.statistics().leased_slabs) == (5, 5)
    assert [timer.cancelled for timer in loop.timers] == [True, False]
    loop.timers[1].fire()
    assert (pins.count, arena.statistics().leased_slabs) == (0, 0)


def test_a_pin_of_nothing_changes_nothing_and_needs_no_timer(arena, loop):
    pins = Pins(max_buffers=8, ttl_s=30)
    assert pins.hold("b", []) == 0
    assert loop.timers == []

    pins.hold("a", lease(arena, 3))
    assert pins.hold("a", []) == 0
    assert (pins.count, len(loop.timers)) == (3, 1)
    pins.release("a")
    assert (pins.count, arena.statistics().leased_slabs, loop.due) == (0, 0, [])


def test_more_than_there_is_room_for_is_not_kept(arena, loop):
    pins = Pins(max_buffers=4, ttl_s=30)
    pins.hold("a", lease(arena, 3))
    leading, *rest = lease(arena, 3)
    pins.hold("b", [leading, *rest])

    assert (pins.count, pins.room, arena.statistics().leased_slabs) == (4, 0, 4)
    assert [buffer.released for buffer in (leading, *rest)] == [False, True, True]
    pins.hold("c", lease(arena, 1))
    assert arena.statistics().leased_slabs == 4
    assert len(loop.due) == 2
    pins.close()


def test_closing_ends_every_pin_and_later_ones_at_once(arena, loop):
    pins = Pins(max_buffers=8, ttl_s=30)
    pins.hold("a", lease(arena, 3))
    pins.hold("b", lease(arena, 1))

    pins.close()
    assert (pins.count, arena.statistics().leased_slabs) == (0, 0)
    pins.hold("late", lease(arena, 2))  # a lookup that was under way

    assert (pins.count, arena.statistics().leased_slabs) == (0, 0)
    assert loop.due == []
    pins.close()


async def test_the_time_is_the_loops(arena):
    pins = Pins(max_buffers=16, ttl_s=0.005)
    pins.hold("a", lease(arena, 16))

    buffer = await arena.lease(10, timeout_s=5)  # there is a slab once the pin has ended

    assert pins.count == 0
    buffer.release()


async def test_a_released_pin_leaves_no_timer_that_ends_a_later_pin_of_the_same_id(arena):
    pins = Pins(max_buffers=16, ttl_s=0.005)
    pins.hold("a", lease(arena, 2))
    pins.release("a")
    pins._ttl_s = 60
    pins.hold("a", lease(arena, 2))
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, passed.set)
    await passed.wait()

    assert pins.count == 2
    pins.close()


@given(
    max_buffers=st.integers(0, 6),
    actions=st.lists(
        st.tuples(st.sampled_from(["hold", "release", "fire"]), st.sampled_from("abc"), st.integers(0, 4)),
        max_size=20,
    ),
)
def test_the_bound_and_the_leases_agree_with_a_model(max_buffers, actions):
    arena, loop, model = new_arena(), FakeLoop(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_module.asyncio, "get_running_loop", lambda: loop)
        pins = Pins(max_buffers=max_buffers, ttl_s=30)
        for action, lookup_id, number in actions:
            if action == "hold":
                kept = min(number, max_buffers - sum(model.values()))
                assert pins.hold(lookup_id, lease(arena, number)) == kept
                model[lookup_id] = model.get(lookup_id, 0) + kept
            elif action == "release":
                model.pop(lookup_id, None)
                pins.release(lookup_id)
            elif loop.due:
                timer = loop.due[number % len(loop.due)]
                model.pop(timer.arguments[0])
                timer.fire()

            assert pins.count == arena.statistics().leased_slabs == sum(model.values()) <= max_buffers
            assert len(loop.due) == sum(count > 0 for count in model.values())
        pins.close()
    assert arena.statistics().leased_slabs == 0
    arena.close()
