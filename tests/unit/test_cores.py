"""A copying thread stays off the core of the thread that waits for it."""

from __future__ import annotations

import os

import pytest

from lmcache_async.device import cores
from lmcache_async.device.cores import current_core, off_core
from lmcache_async.device.progress import LoadProgress


@pytest.fixture(autouse=True)
def own_thread():
    """What a test does to its thread's cores ends with it."""
    allowed = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, allowed)


def test_the_core_is_one_of_those_the_thread_may_use():
    assert current_core() in os.sched_getaffinity(0)
    assert LoadProgress(1).core in os.sched_getaffinity(0)


def test_a_thread_leaves_a_core_for_as_long_as_asked():
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    others = allowed - {core} or allowed  # where there is one core alone it stays

    with off_core(core):
        assert os.sched_getaffinity(0) == others
        assert current_core() in others
    assert os.sched_getaffinity(0) == allowed
    with pytest.raises(ZeroDivisionError), off_core(core):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == allowed


def test_what_somebody_else_has_set_meanwhile_stays():
    core = min(os.sched_getaffinity(0))

    with off_core(core):
        os.sched_setaffinity(0, {core})

    assert os.sched_getaffinity(0) == {core}


@pytest.mark.parametrize("core", [None, 1 << 20])
def test_an_unknown_core_changes_nothing(core):
    allowed = os.sched_getaffinity(0)

    with off_core(core):
        assert os.sched_getaffinity(0) == allowed


def test_the_only_core_is_not_left():
    os.sched_setaffinity(0, {current_core()})

    with off_core(current_core()):
        assert len(os.sched_getaffinity(0)) == 1


def test_where_it_is_forbidden_or_not_known_nothing_happens(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with off_core(current_core()):
        pass
    monkeypatch.delattr(os, "sched_getaffinity")
    with off_core(0):
        pass
    monkeypatch.setattr(cores.ctypes, "CDLL", lambda _: object())
    assert current_core() is None
