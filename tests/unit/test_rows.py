"""Copies of rows between a cache and a payload: by the compiled module and by NumPy."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.device import rows
from lmcache_async.memory.copies import compiled

COMPILED = [] if compiled is None else [compiled]
STREAMS = (0, 1, 4, 8)  # no streaming, and the numbers of pages that are copied at the same time
needs_module = pytest.mark.parametrize("copy", [way.copy for way in COMPILED])
HAS_COMPILER = bool(shutil.which("cc") and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists())


def test_the_module_was_compiled_where_there_is_a_compiler():
    assert len(COMPILED) == HAS_COMPILER


@pytest.mark.parametrize("module", COMPILED)
def test_four_pages_are_streamed_at_the_same_time_on_intel_processors(module):
    on_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    pages = module.STREAM_PAGES
    assert pages == (4 if on_intel else 1)


def noise(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@needs_module
@given(
    data=st.data(),
    size=st.one_of(
        st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 1088, 2048, 5000, 16384, 16500, 33000])
    ),
    shift=st.integers(0, 70),
    stream=st.sampled_from(STREAMS),
    to_payload=st.booleans(),
)
def test_rows_come_to_their_places_and_no_other_byte_changes(copy, data, size, shift, stream, to_payload):
    places = data.draw(st.lists(st.integers(0, 11), max_size=9, unique=True))
    if data.draw(st.booleans()):
        places.sort()  # consecutive rows are copied as one
    skipped = data.draw(st.sets(st.integers(0, 8)))
    memory, payload = noise(12 * size + shift + 3, 1)[shift:], noise(len(places) * size + 1, 2)[1:]
    starts = np.array([-1 if i in skipped else at * size for i, at in enumerate(places)], np.int64)
    expected_memory, expected_payload = memory.copy(), payload.copy()
    for row, start in enumerate(starts.tolist()):
        part, place = slice(row * size, (row + 1) * size), slice(start, start + size)
        if start >= 0 and to_payload:
            expected_payload[part] = memory[place]
        elif start >= 0:
            expected_memory[place] = payload[part]

    copy([(memory, starts, payload, size)], to_payload, stream)

    assert np.array_equal(memory, expected_memory)
    assert np.array_equal(payload, expected_payload)


@needs_module
@pytest.mark.parametrize(
    ("starts", "payload_bytes", "size", "message"),
    [
        ([0, 93], 16, 8, "row 1, at 93, ends beyond the 100 bytes of memory"),
        ([2**62], 8, 8, "row 0, at 4611686018427387904, ends beyond"),
        ([0], 101, 101, "row 0, at 0, ends beyond"),
        ([0, 8], 15, 8, "a payload of 15 bytes is not 2 rows of 8"),
        ([0, 8], 0, 2**62, "a payload of 0 bytes is not 2 rows"),
        ([0], 8, 0, "a payload of 8 bytes is not 1 rows of 0"),
        ([0], 8, -8, "a payload of 8 bytes is not 1 rows of -8"),
    ],
)
@pytest.mark.parametrize("to_payload", [False, True])
def test_jobs_that_do_not_fit_move_nothing(copy, starts, payload_bytes, size, message, to_payload):
    memory, payload = noise(100, 1), noise(payload_bytes, 2)
    before = memory.copy(), payload.copy()

    with pytest.raises(ValueError, match=message):
        copy([(memory, np.array(starts, np.int64), payload, size)], to_payload, False)

    assert np.array_equal(memory, before[0])
    assert np.array_equal(payload, before[1])


@needs_module
def test_row_starts_of_the_wrong_item_size_are_refused(copy):
    with pytest.raises(ValueError, match="items of 4 bytes, not 8"):
        copy([(noise(100, 1), np.array([0], np.int32), noise(8, 2), 8)], False, False)


@needs_module
def test_row_starts_may_lie_at_any_address(copy):
    memory, payload = noise(200, 1), bytearray(60)
    starts = np.frombuffer(b"." + np.array([40, 0, 90]).tobytes(), np.uint8)[1:].view(np.int64)

    copy([(memory, starts, payload, 20)], True, False)

    assert payload == memory[40:60].tobytes() + memory[:20].tobytes() + memory[90:110].tobytes()


@needs_module
def test_row_starts_that_the_copy_overwrites_stay_in_use(copy):
    """Otherwise a row would be copied from an offset that was not checked."""
    memory, starts = np.arange(16, dtype=np.int64), np.array([64, 0, 7, 7])

    copy([(memory, starts[:2], starts, 16)], True, False)

    assert starts.tolist() == [8, 9, 0, 1]


@needs_module
@pytest.mark.parametrize("to_payload", [False, True])
def test_a_row_within_its_payload_is_refused(copy, to_payload):
    memory = noise(300, 1)
    before = memory.copy()

    with pytest.raises(ValueError, match="row 1, at 271, overlaps the payload"):
        copy([(memory, np.array([0, 271]), memory[280:], 10)], to_payload, False)

    assert np.array_equal(memory, before)


@needs_module
def test_a_payload_may_lie_between_the_rows(copy):
    """The memory of a copier reaches from its first storage to its last one."""
    memory = noise(300, 1)
    before = memory.copy()

    copy([(memory, np.array([90, 120]), memory[100:120], 10)], True, False)

    assert np.array_equal(memory[100:120], np.concatenate((before[90:100], before[120:130])))


@needs_module
def test_only_the_target_of_a_copy_must_be_writable(copy):
    starts, fixed = np.array([0], np.int64), noise(8, 2)
    fixed.flags.writeable = False

    copy([(noise(100, 1), starts, fixed, 8)], False, False)
    copy([(fixed, starts, noise(8, 1), 8)], True, False)
    with pytest.raises((ValueError, BufferError)):
        copy([(noise(100, 1), starts, fixed, 8)], True, False)
    with pytest.raises((ValueError, BufferError)):
        copy([(fixed, starts, noise(8, 1), 8)], False, False)
    with pytest.raises((ValueError, BufferError)):
        copy([(noise(200, 1)[::2], starts, noise(8, 1), 8)], False, False)


@needs_module
def test_the_interpreter_lock_is_free_meanwhile(copy):
    memory, payload = noise(16 << 20, 1), noise(16 << 20, 2)
    starts = np.arange(0, 16 << 20, 64 << 10, np.int64)
    stop, turns = threading.Event(), [0]

    def turn():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)  # releases the lock; no other thread takes it here

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    other = threading.Thread(target=turn)
    other.start()
    try:
        during = 0
        for _ in range(2000):  # it may take several before the other thread gets a core
            before = turns[0]
            copy([(memory, starts, payload, 64 << 10)], False, True)
            during = turns[0] - before
            if during:
                break
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        other.join(20)

    assert during > 0
    assert np.array_equal(memory, payload)


@needs_module
@given(
    sizes=st.lists(st.sampled_from([1, 64, 1024, 20000]), max_size=4),
    stream=st.sampled_from(STREAMS),
    to_payload=st.booleans(),
)
def test_several_pieces_are_copied_in_one_call(copy, sizes, stream, to_payload):
    memory = noise(3 * sum(sizes), 1)
    payloads = [noise(2 * size, seed) for seed, size in enumerate(sizes, 2)]
    edges = np.cumsum([0, *sizes]) * 3
    starts = [np.array([edge + 2 * size, edge], np.int64) for edge, size in zip(edges, sizes, strict=False)]
    expected_memory = memory.copy()
    expected_payloads = [payload.copy() for payload in payloads]
    for size, places, payload in zip(sizes, starts, expected_payloads, strict=True):
        for row, place in enumerate(places.tolist()):
            part, here = slice(row * size, (row + 1) * size), slice(place, place + size)
            if to_payload:
                payload[part] = memory[here]
            else:
                expected_memory[here] = payload[part]

    pieces = [(memory, *each) for each in zip(starts, payloads, sizes, strict=True)]
    copy(pieces, to_payload, stream)

    assert np.array_equal(memory, expected_memory)
    assert all(map(np.array_equal, payloads, expected_payloads))
    references = sys.getrefcount(memory)
    copy(pieces, to_payload, stream)
    assert sys.getrefcount(memory) == references


@needs_module
def test_one_piece_that_does_not_fit_stops_all(copy):
    memory, payload = noise(100, 1), np.zeros(8, np.uint8)
    good = (memory, np.zeros(1, np.int64), payload, 8)
    references = sys.getrefcount(memory)

    with pytest.raises(ValueError, match="row 0, at 93, ends beyond the 100 bytes of memory"):
        copy([good, (memory, np.array([93]), np.zeros(8, np.uint8), 8)], True, False)
    with pytest.raises(TypeError, match="a piece is a tuple"):
        copy([good, list(good)], True, False)
    with pytest.raises(TypeError, match="takes exactly 4 arguments"):
        copy([good, good[:3]], True, False)
    with pytest.raises(TypeError, match="must be list"):
        copy((good,), True, False)
    for stream in (-1, 9):
        with pytest.raises(ValueError, match=f"stream is {stream}, expected 0 to 8 pages"):
            copy([good], True, stream)

    assert not payload.any()
    assert sys.getrefcount(memory) == references


@needs_module
def test_a_list_that_changes_during_the_call_is_refused(copy):
    """The `__index__` of a row size runs Python code while the pieces are read."""

    class Shortens:
        def __index__(self):
            del pieces[1:]
            return 8

    payload = np.zeros(8, np.uint8)
    rest = (noise(100, 1), np.zeros(1, np.int64), payload)
    pieces = [(*rest, Shortens()), (*rest, 8)]

    with pytest.raises(RuntimeError, match="changed during the call"):
        copy(pieces, True, False)
    assert not payload.any()


@pytest.mark.parametrize("to_payload", [False, True])
def test_without_the_module_long_runs_of_small_rows_are_copied_as_one(monkeypatch, to_payload):
    monkeypatch.setattr(rows, "compiled", None)
    size, calls = 4096, []
    per_run = rows.LONG_RUN_BYTES // size
    memory, payload = noise(4 * rows.LONG_RUN_BYTES, 1), noise(2 * rows.LONG_RUN_BYTES, 2)
    copyto = np.copyto
    monkeypatch.setattr(np, "copyto", lambda *arrays: calls.append(copyto(*arrays)))
    second, first = np.arange(per_run) * size, (np.arange(per_run) + 2 * per_run) * size

    rows.copy_rows(
        [(memory, np.concatenate((first, second)), payload, size)], to_payload=to_payload, stream=False
    )

    runs = np.concatenate([memory[each[0] : each[-1] + size] for each in (first, second)])
    assert np.array_equal(payload, runs)
    assert len(calls) == 2
