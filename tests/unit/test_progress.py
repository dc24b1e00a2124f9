"""Progress of a load, and its parts, which several threads take in turn."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import threading
import time
import weakref
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.device.progress import CopyPart, LoadProgress, PartQueue, current_core, off_core

LONG_S = 150  # only a hang takes this long


class WatchedCondition(threading.Condition):
    """A condition that reports the start and the timeout of each wait."""

    def __init__(self):
        super().__init__()
        self.waits = queue.Queue()

    def wait(self, timeout=None):
        self.waits.put(timeout)
        return super().wait(timeout)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def progress(pool):  # ends before the pool, which waits for its threads
    progress = LoadProgress(4)
    progress._changed = WatchedCondition()
    yield progress
    progress.advance(4)
    progress.end()  # otherwise a failed test would leave its threads


def waits(progress):
    """Wait until a thread is waiting, so that later notifications reach it, and return its timeout."""
    return progress._changed.waits.get(timeout=LONG_S)


def soon():
    return time.monotonic() + LONG_S


def now():
    return time.monotonic()


# ---- LoadProgress ----------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.lists(st.integers(0, 6), max_size=6), st.integers(0, 9))
def test_a_wait_ends_at_once_exactly_if_so_many_planes_are_written(num_planes, told, asked):
    progress = LoadProgress(num_planes)
    for planes in told:
        progress.advance(min(planes, num_planes))

    progress.wait(asked, deadline=now())

    written = min(max(told, default=0), num_planes)
    assert progress.abandoned == (written < min(asked, num_planes))


@pytest.mark.parametrize("end", [lambda progress: progress.advance(2), LoadProgress.end])
def test_a_wait_ends_when_its_planes_are_written_and_with_the_load(progress, pool, end):
    waiting = pool.submit(progress.wait, 2, deadline=soon())
    waits(progress)

    progress.advance(1)
    waits(progress)
    assert not waiting.done()
    end(progress)

    waiting.result(LONG_S)
    assert not progress.abandoned


def test_a_load_that_has_not_begun_by_the_deadline_may_not_begin_and_is_waited_for_no_more(progress):
    progress.wait(1, deadline=now() + 0.001)
    assert waits(progress) is not None

    assert progress.abandoned
    assert not progress.begin()
    progress.wait(4, deadline=soon())  # would wait until its deadline, longer than a test may take
    assert progress._changed.waits.empty()


def test_a_load_that_has_begun_is_waited_for_beyond_the_deadline(progress, pool):
    assert progress.begin()
    waiting = pool.submit(progress.wait, 1, deadline=now() - 1)
    assert waits(progress) is None

    progress.advance(1)

    waiting.result(LONG_S)
    assert not progress.abandoned
    assert progress.begin()  # the next batch of the same load


def test_a_load_that_begins_while_it_is_waited_for_has_no_deadline_any_more(progress, pool):
    waiting = pool.submit(progress.wait, 1, deadline=soon() + LONG_S)
    assert waits(progress) is not None

    assert progress.begin()

    assert waits(progress) is None
    progress.advance(1)
    waiting.result(LONG_S)


def test_a_waiting_thread_helps_up_to_the_planes_it_needs(progress):
    asked = []

    def work(planes):
        asked.append((planes, threading.get_ident()))
        progress.advance(planes)

    progress.begin()
    progress.set_worker(work)

    progress.wait(2, deadline=now())
    progress.wait(1, deadline=now())
    progress.wait(9, deadline=now())

    assert asked == [(2, threading.get_ident()), (4, threading.get_ident())]


def test_a_waiting_thread_helps_once_and_then_waits(progress, pool):
    asked = []
    progress.begin()
    progress.set_worker(asked.append)

    waiting = pool.submit(progress.wait, 2, deadline=soon())
    waits(progress)
    progress.advance(1)
    waits(progress)
    progress.advance(2)

    waiting.result(LONG_S)
    assert asked == [2]


def test_a_waiting_thread_helps_on_request(progress, pool):
    helpers = []

    def work(planes):
        helpers.append(threading.get_ident())
        progress.advance(planes)

    progress.begin()
    waiting = pool.submit(lambda: (progress.wait(3, deadline=soon()), threading.get_ident())[1])
    waits(progress)

    progress.set_worker(work)

    assert waiting.result(LONG_S) == helpers[0]
    assert len(helpers) == 1


def test_an_ended_load_is_not_helped_and_keeps_nothing_of_the_copy(progress):
    class Copy:
        def work(self, planes):
            pytest.fail("helped")

    copy = Copy()
    gone = weakref.ref(copy)
    progress.begin()
    progress.set_worker(copy.work)

    progress.end()
    progress.wait(2, deadline=soon())

    del copy
    assert gone() is None


def test_wait_ended_is_true_once_the_outcome_is_known(progress, pool):
    progress.begin()
    waiting = pool.submit(progress.wait_ended, deadline=soon())
    waits(progress)
    progress.advance(4)
    waits(progress)
    assert not waiting.done()

    progress.end()

    assert waiting.result(LONG_S) is True
    assert progress.wait_ended(deadline=now())


@pytest.mark.parametrize(
    ("events", "ended", "abandoned"),
    [
        ([LoadProgress.end], True, False),
        ([], False, True),
        ([LoadProgress.begin, lambda progress: progress.advance(4)], False, False),  # its outcome is late
    ],
)
def test_wait_ended_tells_whether_the_outcome_is_known(progress, events, ended, abandoned):
    for event in events:
        event(progress)

    assert progress.wait_ended(deadline=now()) == ended
    assert progress.abandoned == abandoned


def test_wait_ended_never_leaves_while_something_is_written(progress, pool):
    progress.begin()
    progress.advance(3)
    waiting = pool.submit(progress.wait_ended, deadline=now() - 1)
    assert waits(progress) is None

    progress.advance(4)

    assert waiting.result(LONG_S) is False


# ---- PartQueue -------------------------------------------------------------------------------------------


class Gated:
    """Parts that report their start and end on request of the test.

    Attributes:
        begun: Numbers of the parts, in order of their start.
        told: Planes reported by the queue.
    """

    def __init__(self, firsts, planes, errors=None):
        self.begun, self.told = queue.Queue(), queue.Queue()
        self.copied = []
        self._errors = errors or {}
        self._gates = [threading.Event() for _ in firsts]
        parts = [CopyPart(first, partial(self._copy, number)) for number, first in enumerate(firsts)]
        self.queue = PartQueue(parts, planes, self.told.put)

    def _copy(self, number):
        self.begun.put(number)
        assert self._gates[number].wait(LONG_S)
        self.copied.append(number)
        if number in self._errors:
            raise self._errors[number]

    def next(self):
        return self.begun.get(timeout=LONG_S)

    def finish(self, *numbers):
        for number in numbers:
            self._gates[number].set()


firsts_of_parts = st.lists(st.integers(0, 5), min_size=1, max_size=8).map(sorted)


@given(firsts_of_parts, st.lists(st.integers(0, 8), max_size=3))
def test_parts_run_in_order_and_only_those_that_write_to_the_planes_asked_for(firsts, asked):
    run, told = [], []
    parts = [CopyPart(first, partial(run.append, number)) for number, first in enumerate(firsts)]
    parts_queue = PartQueue(parts, 6, told.append)

    for count, planes in enumerate(asked, 1):
        parts_queue.work(planes)
        assert run == list(range(sum(first < max(asked[:count]) for first in firsts)))
    assert parts_queue.done.done() == (len(run) == len(firsts))
    parts_queue.work()

    assert run == list(range(len(firsts)))
    assert told == [*firsts[1:], 6]
    assert parts_queue.done.result(0) is None


@given(firsts_of_parts, st.integers(1, 4), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_planes_are_reported_when_all_parts_before_them_have_ended(firsts, threads, choices):
    gated = Gated(firsts, 6)
    running, unfinished, told = [], dict(enumerate(firsts)), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(threads):
            pool.submit(gated.queue.work)
        while unfinished:
            while len(running) < min(threads, len(unfinished)):
                running.append(gated.next())
            assert not gated.queue.done.done()
            last = running.pop(choices.pop() % len(running))
            del unfinished[last]
            gated.finish(last)

            told.append(gated.told.get(timeout=LONG_S))
            assert told[-1] == min(unfinished.values(), default=6)
        gated.queue.done.result(LONG_S)

    assert told == sorted(told)
    assert gated.told.empty()


def test_an_error_withdraws_waiting_calls_and_is_raised_when_running_calls_have_ended(pool):
    error = OSError("no")
    gated = Gated([0, 1, 2, 3], 4, {1: error})
    workers = [pool.submit(gated.queue.work) for _ in range(2)]
    assert sorted([gated.next(), gated.next()]) == [0, 1]

    gated.finish(1)
    wait(workers, LONG_S, FIRST_COMPLETED)  # it has no parts left
    assert not gated.queue.done.done()
    gated.finish(0)

    gated.queue.done.result(LONG_S)
    assert gated.queue.take_error() is error
    assert [worker.result(LONG_S) for worker in workers] == [None, None]
    assert gated.told.empty()  # plane 1 may be torn, and plane 0 is useless without an outcome
    assert (gated.begun.empty(), sorted(gated.copied)) == (True, [0, 1])


def test_an_interrupt_during_a_part_ends_the_load_and_reaches_the_thread_that_copies():
    """SIGTERM raises SystemExit in the main thread of a worker of vLLM, which helps to copy a load."""
    ran = []
    parts = [
        CopyPart(0, partial(signal.raise_signal, signal.SIGINT)),
        CopyPart(1, partial(ran.append, 1)),
    ]
    parts_queue = PartQueue(parts, 2, ran.append)

    with pytest.raises(KeyboardInterrupt):
        parts_queue.work()

    assert parts_queue.done.done()
    assert isinstance(parts_queue.take_error(), KeyboardInterrupt)
    assert ran == []


def test_a_withdrawn_load_ends_with_its_running_parts_and_reports_no_plane(pool):
    gated = Gated([0, 1, 2], 3)
    workers = [pool.submit(gated.queue.work) for _ in range(2)]
    gated.next(), gated.next()

    gated.queue.withdraw()
    gated.queue.withdraw()
    assert not gated.queue.done.done()
    gated.finish(0)
    wait(workers, LONG_S, FIRST_COMPLETED)
    assert not gated.queue.done.done()
    gated.finish(1)

    assert gated.queue.done.result(LONG_S) is None
    assert gated.told.empty()
    assert sorted(gated.copied) == [0, 1]


def test_a_load_withdrawn_during_its_last_part_is_completed(pool):
    gated = Gated([0, 1], 2)
    worker = pool.submit(gated.queue.work)
    gated.finish(gated.next())
    gated.next()

    gated.queue.withdraw()
    gated.finish(1)

    worker.result(LONG_S)
    assert [gated.told.get_nowait(), gated.told.get_nowait()] == [1, 2]
    assert gated.queue.done.result(LONG_S) is None


class Payload:
    """An object to be watched by a weak reference."""


@pytest.mark.parametrize(
    ("error", "withdrawn", "expected"),
    [(None, False, [2, 1, 0, 0]), (None, True, [0]), (OSError("no"), False, [0])],
)
def test_payloads_are_released_before_their_planes_are_reported_or_the_copy_ends(
    collector_off, error, withdrawn, expected
):
    held = []

    def copy(payload):
        del payload
        if error is not None:
            raise error

    def count(_):
        held.append(sum(ref() is not None for ref in gone))

    payloads = [Payload() for _ in range(3)]
    parts = [CopyPart(first, partial(copy, payload)) for first, payload in enumerate(payloads)]
    gone = [weakref.ref(payload) for payload in payloads]
    parts_queue = PartQueue(parts, 3, count)
    parts_queue.done.add_done_callback(count)
    del parts, payloads

    if withdrawn:
        parts_queue.withdraw()
    parts_queue.work()

    assert held == expected
    assert parts_queue.done.done()
    assert parts_queue.take_error() is error


# ---- cores -----------------------------------------------------------------------------------------------


@pytest.fixture
def own_thread():
    """Restore the CPU affinity of the test's thread afterwards."""
    allowed = os.sched_getaffinity(0)
    yield allowed
    os.sched_setaffinity(0, allowed)


def test_a_thread_leaves_a_core_for_as_long_as_asked(own_thread):
    core = min(own_thread)
    others = own_thread - {core} or own_thread  # with a single core it stays there

    with contextlib.suppress(ZeroDivisionError), off_core(core):
        assert os.sched_getaffinity(0) == others
        assert current_core() in others
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == own_thread
    assert LoadProgress(1).core in own_thread


def test_foreign_affinity_changes_are_kept_and_the_only_core_is_not_left(own_thread):
    core = min(own_thread)

    with off_core(core):
        os.sched_setaffinity(0, {core})
    assert os.sched_getaffinity(0) == {core}
    with off_core(core):
        assert os.sched_getaffinity(0) == {core}


@pytest.mark.parametrize("core", [None, 1 << 20])
def test_an_unknown_core_changes_nothing(own_thread, core):
    with off_core(core):
        assert os.sched_getaffinity(0) == own_thread


def test_unsupported_or_forbidden_affinity_is_ignored(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with off_core(current_core()):
        pass
    monkeypatch.delattr(os, "sched_getaffinity")
    with off_core(0):
        pass
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert current_core() is None
