"""Comparison with peers, in this process and in a child process."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_async.bench.measure import Frame
from lmcache_async.bench.memory import CacheForm
from tests.support import forked_python
from tools.benchmarks import peers, peers_vllm
from tools.benchmarks.peers import HASH_LIST, LOOKUP, RETRIEVE, STORE, Kind, PeerError, Workload

pytestmark = pytest.mark.one_loop

WORK = Workload(CacheForm(512, layers=2, heads=2, head_dim=8), hash_tokens=1024, chunks=4)
ABSENT = Kind("Absent", "no_such_package", "no_such_module")


class FakePeer:
    """A peer that takes one second per operation, except for unsupported operations and those with a limited count."""

    def __init__(self, name="fake 1.0", *, fails=(), times=10**9):
        self.name = name
        self.tasks = WORK.tasks().keys()
        self.fails = fails
        self.left = times
        self.asked = []

    async def seconds(self, task):
        self.asked.append(task)
        self.left -= 1
        if task in self.fails or self.left < 0:
            raise PeerError("out of order")
        return 1.0


def quick(rounds=1):
    return Frame(rounds=rounds, quick=True, chosen=random.Random(0))


async def rows_of(frame, *some):
    return [row async for row in peers.measure(WORK, frame, some)]


async def test_every_task_is_measured_beside_every_peer():
    frame = quick()

    rows = await rows_of(frame, FakePeer("a 1"), FakePeer("b 2"))

    assert {(row.name, row.limit_name) for row in rows} == {
        (name, peer) for name in WORK.tasks() for peer in ("a 1", "b 2")
    }
    assert frame.left_out == []
    assert all(row.value > 0 for row in rows)
    limits = {row.name: row.limit_value for row in rows}
    assert limits[HASH_LIST] == 1024 / 1e6
    assert limits[STORE] == 512 * 2 * 2 * 2 * 8 * 2 / 1e9
    assert limits[LOOKUP] == 1e6 / 4


async def test_tasks_that_a_peer_cannot_do_are_left_out():
    frame = quick()

    rows = await rows_of(frame, FakePeer(fails={STORE, LOOKUP}))

    assert {row.name for row in rows} == set(WORK.tasks()) - {STORE, LOOKUP}
    assert frame.left_out == [f"{name}, fake 1.0: out of order" for name in (STORE, LOOKUP)]


async def test_a_peer_is_only_asked_for_its_tasks():
    frame, peer = quick(), FakePeer()
    peer.tasks = {HASH_LIST}

    rows = await rows_of(frame, peer)

    assert {row.name for row in rows} == {HASH_LIST} == set(peer.asked)
    assert frame.left_out == []


async def test_a_peer_that_fails_later_is_left_out_too_and_others_stay():
    frame, failing = quick(rounds=3), FakePeer("failing", times=2)

    rows = await rows_of(frame, failing, FakePeer("sound"))

    assert {row.limit_name for row in rows} == {"sound"}
    assert {row.name for row in rows} == set(WORK.tasks())
    assert f"{HASH_LIST}, failing: out of order" in frame.left_out


async def test_without_a_peer_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(peers, "KINDS", (ABSENT,))
    frame = quick()

    rows = [row async for row in peers.run(peers.QUICK, frame)]

    assert rows == []
    assert frame.left_out == ["Absent: the package no_such_package is not installed"]


@pytest.fixture(scope="module")
def kind():
    """The peer of fake_peer.py, which a child process imports by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
        context = forked_python.context()
        patch.setattr(peers.multiprocessing, "get_context", lambda method: context)  # the child imports torch
        yield Kind("Fake", "json", "fake_peer")


@pytest.fixture(scope="module")
def peer(kind):
    """One process for all tests that do not end it."""
    with kind.open(WORK) as opened:
        yield opened


def seconds(peer, task):
    return asyncio.run(peer.seconds(task))


def test_a_peer_in_a_process_prepares_a_task_once_and_again_after_another(peer):
    first, again, other, last = [seconds(peer, task) for task in (HASH_LIST, HASH_LIST, STORE, HASH_LIST)]

    assert peer.tasks == {HASH_LIST, STORE, RETRIEVE, LOOKUP}
    assert (again, other, last) == (first, 512 * (first + 1), first + 2)


def test_an_error_in_the_process_of_a_peer_is_reported_in_one_line_and_the_peer_continues(peer):
    with pytest.raises(PeerError, match=r"^ValueError: no memory at all$"):
        seconds(peer, RETRIEVE)
    assert seconds(peer, HASH_LIST) > 0


def test_a_peer_whose_process_died_is_reported_from_then_on(kind):
    with kind.open(WORK) as peer:
        for task in (LOOKUP, HASH_LIST):
            with pytest.raises(PeerError, match="its process has ended"):
                seconds(peer, task)


def test_a_peer_that_does_not_answer_in_time_is_an_error():
    connection = SimpleNamespace(send_bytes=lambda _: None, poll=lambda _: False)

    with pytest.raises(PeerError, match="no answer within 120 s"):
        seconds(peers.ChildPeer("slow", connection), HASH_LIST)


def test_vllm_hashes_the_prompt():
    with peers_vllm.tasks(WORK)[HASH_LIST]() as run:
        assert run() > 0


def test_a_peer_that_cannot_be_imported_says_why(kind):
    broken = Kind("Broken", "json", "no_such_module_at_all")

    with pytest.raises(PeerError, match="No module named 'no_such_module_at_all'"), broken.open(WORK):
        pass


def test_a_kind_is_named_with_its_version():
    import numpy as np

    assert Kind("NumPy", "numpy", "").name == f"NumPy {np.__version__}"
    assert ABSENT.name == "Absent"
