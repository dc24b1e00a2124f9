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
    thing, keyword = Thing(), Thing()
    watched = weakref.ref(thing), weakref.ref(keyword)
    alive = []

    future = pool.submit(lambda _, other: gate.wait(10) and other is not None, thing, other=keyword)
    future.add_done_callback(lambda _: alive.extend(ref() is not None for ref in watched))  # on the worker
    del thing, keyword
    gate.set()

    assert future.result(timeout=10) is True
    pool.shutdown()
    assert alive == [False, False]


def test_the_closure_of_the_function_is_released_too(pool):
    gate = threading.Event()
    thing = Thing()
    watched = weakref.ref(thing)
    alive = []

    def closing_over(held=thing):
        return gate.wait(10) and held is not None

    future = pool.submit(closing_over)
    future.add_done_callback(lambda _: alive.append(watched() is not None))
    del thing, closing_over
    gate.set()

    assert future.result(timeout=10) is True
    pool.shutdown()
    assert alive == [False]


def test_a_withdrawn_call_holds_nothing(pool):
    gate = threading.Event()
    running = pool.submit(gate.wait, 10)
    thing = Thing()
    watched = weakref.ref(thing)

    waiting = pool.submit(id, thing)
    del thing
    assert watched() is not None
    assert waiting.cancel()
    assert watched() is None

    gate.set()
    assert running.result(timeout=10)


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


def test_an_error_reaches_the_caller(pool):
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(timeout=10)
