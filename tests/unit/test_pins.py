"""Pins: leases by lookup id, limited in number and time, all released at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.engine import lookup as lookup_module
from lmcache_async.engine.lookup import Pins
from lmcache_async.memory.arena import Arena


def new_arena(slabs=16):
    return Arena(slabs * 4096, 4096, prefault=False, huge_pages=False)


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
    """A loop whose timers are fired by the test."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay, callback, *arguments):
        self.timers.append(FakeTimer(delay, callback, arguments))
        return self.timers[-1]

    @property
    def due(self):
        return [timer for timer in self.timers if not timer.cancelled]


async def test_the_time_is_the_loops():
    arena = new_arena()
    pins = Pins(max_buffers=16, ttl_s=0.005)
    pins.hold("a", lease(arena, 16))

    buffer = await arena.lease(10, timeout_s=60)  # a slab is free once the pin has ended

    assert pins.count == 0
    buffer.release()
    arena.close()


@given(
    max_buffers=st.integers(0, 6),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["hold", "release", "fire", "close"]), st.sampled_from("abc"), st.integers(0, 4)
        ),
        max_size=20,
    ),
)
def test_the_bound_and_the_leases_agree_with_a_model(max_buffers, actions):
    arena, loop, model, is_closed = new_arena(), FakeLoop(), {}, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_module.asyncio, "get_running_loop", lambda: loop)
        pins = Pins(max_buffers=max_buffers, ttl_s=30)
        for action, lookup_id, number in [*actions, ("close", "", 0)]:
            if action == "hold":
                kept = 0 if is_closed else min(number, max_buffers - sum(model.values()))
                buffers = lease(arena, number)
                assert pins.hold(lookup_id, buffers) == kept
                assert [buffer.released for buffer in buffers] == [False] * kept + [True] * (number - kept)
                model[lookup_id] = model.get(lookup_id, 0) + kept
                assert not kept or (loop.timers[-1].delay, loop.timers[-1].cancelled) == (30, False)
            elif action == "release":
                model.pop(lookup_id, None)
                pins.release(lookup_id)
            elif action == "close":  # a running lookup may hold leases afterwards
                is_closed = True
                model.clear()
                pins.close()
            elif loop.due:
                timer = loop.due[number % len(loop.due)]
                model.pop(timer.arguments[0])
                timer.fire()

            assert pins.count == arena.statistics().leased_slabs == sum(model.values()) <= max_buffers
            assert pins.room == max_buffers - pins.count
            assert len(loop.due) == sum(count > 0 for count in model.values())
    arena.close()
