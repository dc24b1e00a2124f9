"""Copies in host memory: with the compiled module, cached or streaming, and with NumPy."""

from __future__ import annotations

import importlib.util
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.memory import copies

WAYS = [None] if copies.compiled is None else [copies.compiled, None]


@pytest.fixture(autouse=True, scope="module", params=WAYS)
def way(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "compiled", request.param)
        yield


@given(
    st.integers(0, 5000), st.integers(0, 130), st.integers(0, 130), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_all_bytes_come_and_no_other_is_written(length, source_start, target_start, stream, seed):
    dice = np.random.default_rng(seed)
    source = dice.integers(0, 256, source_start + length, np.uint8)
    target = dice.integers(0, 256, target_start + length + 100, np.uint8)
    expected = target.copy()
    expected[target_start : target_start + length] = source[source_start:]

    copies.copy_bytes(target[target_start : target_start + length], source[source_start:], stream=stream)

    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("target", "source"), [(4, 5), (5, 4), (0, 1), (1, 0)])
def test_lengths_that_differ_are_refused_before_a_byte_is_written(target, source):
    into = np.zeros(target, np.uint8)
    with pytest.raises(ValueError, match=f"{source} bytes to {target} bytes: the lengths differ"):
        copies.copy_bytes(into, np.ones(source, np.uint8), stream=True)
    assert not into.any()


def run(
    way: copies.StreamingChoice, speeds: dict[bool, float], batches: int, nbytes: int = copies.STREAM_BYTES
) -> list[bool]:
    chosen = []
    for _ in range(batches):
        chosen.append(way.choose(nbytes))
        way.note(stream=chosen[-1], nbytes=nbytes, seconds=nbytes / speeds[chosen[-1]])
    return chosen


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_taken_and_the_other_one_tried_again(faster, monkeypatch):
    monkeypatch.setattr(copies, "compiled", types.ModuleType("_rows"))
    way = copies.StreamingChoice()
    speeds = {faster: 12e9, not faster: 10e9}

    chosen = run(way, speeds, 200)

    assert chosen.count(not faster) == way.TRIALS + 200 // way.RETRIAL_INTERVAL
    speeds[not faster] = 40e9  # simulates another machine
    run(way, speeds, 10 * way.RETRIAL_INTERVAL)
    assert run(way, speeds, 10).count(faster) <= 1


def test_small_batches_stay_in_the_caches_and_teach_nothing(monkeypatch):
    monkeypatch.setattr(copies, "compiled", types.ModuleType("_rows"))
    way = copies.StreamingChoice()

    assert not any(run(way, {False: 1e9, True: 1e9}, 10, copies.STREAM_BYTES - 1))
    assert run(way, {False: 1e9, True: 2e9}, 6) == [False] * 3 + [True] * 3


def test_without_the_module_there_is_one_way(monkeypatch):
    monkeypatch.setattr(copies, "compiled", None)
    assert not any(run(copies.StreamingChoice(), {False: 1e9}, 10))


def test_a_module_built_from_older_source_is_not_used(monkeypatch):
    """As after an update of an editable installation without a rebuild."""
    monkeypatch.setitem(sys.modules, "lmcache_async.memory._rows", types.ModuleType("_rows"))
    monkeypatch.setattr(
        "lmcache_async.memory._rows", sys.modules["lmcache_async.memory._rows"], raising=False
    )
    specification = importlib.util.spec_from_file_location("copies_again", copies.__file__)
    again = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "copies_again", again)

    specification.loader.exec_module(again)

    assert again.compiled is None
