"""A worker pool drops references to a call's arguments before its future resolves."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from lmcache_async.memory.threads import WorkerPool, in_thread


class Thing:
    """An object that supports weak references."""


@pytest.fixture
def pool():
    with WorkerPool(1) as workers:
        yield workers


def test_arguments_are_gone_when_the_future_is_done(pool):
    gate = threading.Event()
    thing, keyword, closed_over = Thing(), Thing(), Thing()
    watched = [weakref.ref(each) for each in (thing, keyword, closed_over)]
    alive = []

    def call(_, other, held=closed_over):
        return gate.wait(60) and other is not held

    future = pool.submit(call, thing, other=keyword)
    future.add_done_callback(lambda _: alive.extend(ref() is not None for ref in watched))  # on the worker
    del thing, keyword, closed_over, call
    gate.set()

    assert future.result(timeout=60) is True
    pool.shutdown()
    assert alive == [False, False, False]


def test_a_withdrawn_call_holds_nothing(pool):
    gate = threading.Event()
    running = pool.submit(gate.wait, 60)
    thing = Thing()
    watched = weakref.ref(thing)

    waiting = pool.submit(id, thing)
    del thing
    assert watched() is not None
    assert waiting.cancel()
    assert watched() is None

    gate.set()
    assert running.result(timeout=60)


async def test_an_error_does_not_keep_the_function_that_raised_it(pool):
    thing = Thing()
    watched = weakref.ref(thing)

    def fail(held=thing):
        raise LookupError(held is not None)

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(LookupError, match="True"):
            await in_thread(pool, fail)
        del thing, fail
        assert watched() is None
    finally:
        gc.enable()
