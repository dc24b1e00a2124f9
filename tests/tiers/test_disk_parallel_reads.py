"""Parallel reads: each file gets its own bytes, in order of tickets, and no memory is held at the end."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_async.memory.buffer import PAGE
from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.plugins.disk.files import ParallelReads, piece_size

PIECE = 4 * PAGE
WAIT_S = 30.0
THREADS = 4

Bytes = npt.NDArray[np.uint8]


class Files:
    """Open files of random bytes, and reads of them in threads of their own."""

    def __init__(self, folder: Path, helpers: int = 0) -> None:
        self.folder = folder
        self.helpers = ThreadPoolExecutor(helpers) if helpers else None
        self.asked = 0
        self.reads = ParallelReads(PIECE, threads=THREADS, start_helper=self.ask if helpers else None)
        self.pool = ThreadPoolExecutor(THREADS)
        self.descriptors: list[int] = []

    def add(self, nbytes: int) -> tuple[int, bytes]:
        content = np.random.default_rng(len(self.descriptors)).bytes(nbytes)
        path = self.folder / str(len(self.descriptors))
        path.write_bytes(content)
        self.descriptors.append(os.open(path, os.O_RDONLY))
        return self.descriptors[-1], content

    def start(self, descriptor: int, memory: Bytes, ticket: int | None = None) -> Future[int]:
        ticket = self.reads.ticket() if ticket is None else ticket
        return self.pool.submit(self.reads.read, ticket, descriptor, memory.data)

    def ask(self, call: Callable[[], None]) -> None:
        assert self.helpers is not None
        self.asked += 1
        self.helpers.submit(call)

    def shut(self) -> None:
        """All that runs has ended then, and no thread knows anything of it."""
        self.pool.shutdown()
        if self.helpers is not None:
            self.helpers.shutdown()

    def close(self) -> None:
        self.shut()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path)
    yield files
    files.close()


@pytest.fixture(params=[0, THREADS], ids=["alone", "helped"])
def any_files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Files]:
    files = Files(tmp_path, helpers=request.param)
    yield files
    files.close()


@pytest.fixture
def helped(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path, helpers=THREADS)
    yield files
    files.close()


class Log:
    """Which piece of which file was read, in order; holds a file's reads up when asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.held: dict[int, threading.Event] = {}
        self.begun = threading.Semaphore(0)
        self.fail: Callable[[int, int], None] = lambda descriptor, offset: None
        real = disk_files.read_all

        def read_all(descriptor: int, view: memoryview, offset: int = 0) -> int:
            self.pieces.append((descriptor, offset))
            self.begun.release()
            if descriptor in self.held:
                assert self.held[descriptor].wait(WAIT_S)
            self.fail(descriptor, offset)
            return real(descriptor, view, offset)

        monkeypatch.setattr(disk_files, "read_all", read_all)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3 * PIECE + 5), min_size=1, max_size=8),
    cut=st.lists(st.integers(0, 2 * PIECE), min_size=8, max_size=8),
)
def test_each_file_gives_its_own_bytes_up_to_its_end(
    any_files: Files, sizes: list[int], cut: list[int]
) -> None:
    files = any_files
    started = []
    for size, missing in zip(sizes, cut, strict=False):
        descriptor, content = files.add(max(size - missing, 0))
        memory = np.zeros(size, np.uint8)
        started.append((files.start(descriptor, memory), memory, content))

    for future, memory, content in started:
        assert future.result(WAIT_S) == len(content)
        assert memory[: len(content)].tobytes() == content


@given(nbytes=st.integers(0, 64 << 20), about=st.integers(1, 1024).map(lambda pages: pages * PAGE))
def test_pieces_are_whole_pages_and_nearly_alike(nbytes: int, about: int) -> None:
    piece = piece_size(nbytes, about)

    assert piece % PAGE == 0
    assert PAGE <= piece <= max(1.5 * about + PAGE, PAGE)
    count = -(-nbytes // piece)
    assert count <= max(nbytes // about + 1, 1)
    if nbytes >= about:
        assert piece > about / 2


@pytest.mark.parametrize(("payload", "count"), [(2 << 20, 1), (8 << 20, 4), (16 << 20, 8), (3 << 20, 2)])
def test_a_record_s_page_of_header_is_no_piece_of_its_own(payload: int, count: int) -> None:
    piece = piece_size(payload + PAGE, 2 << 20)

    assert -(-(payload + PAGE) // piece) == count


def test_all_threads_read_the_first_file_before_the_next(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    first, second = files.add(8 * PIECE)[0], files.add(2 * PIECE)[0]
    log.held = {first: threading.Event()}
    futures = [files.start(first, np.zeros(8 * PIECE, np.uint8))]
    assert log.begun.acquire(timeout=WAIT_S)
    futures.append(files.start(second, np.zeros(2 * PIECE, np.uint8)))
    assert log.begun.acquire(timeout=WAIT_S)
    assert log.pieces == [(first, 0), (first, PIECE)]  # the second's thread helps the first

    log.held[first].set()
    assert [future.result(WAIT_S) for future in futures] == [8 * PIECE, 2 * PIECE]
    order = [descriptor for descriptor, _ in log.pieces]
    assert order.index(second) >= 7  # not before the first's pieces were all begun, but for one at most


def test_a_lower_ticket_comes_first(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    ticket = files.reads.ticket()
    late, early = (files.add(3 * PIECE)[0] for _ in range(2))
    log.held = {late: threading.Event(), early: threading.Event()}
    futures = [files.start(late, np.zeros(3 * PIECE, np.uint8))]
    assert log.begun.acquire(timeout=WAIT_S)
    futures.append(files.start(early, np.zeros(3 * PIECE, np.uint8), ticket))
    assert log.begun.acquire(timeout=WAIT_S)
    log.held[late].set()
    assert log.begun.acquire(timeout=WAIT_S)

    assert log.pieces == [(late, 0), (early, 0), (early, PIECE)]
    log.held[early].set()
    assert [future.result(WAIT_S) for future in futures] == [3 * PIECE] * 2


def test_a_file_alone_is_read_by_all_threads(helped: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    descriptor, content = helped.add(9 * PIECE)
    log.held = {descriptor: threading.Event()}
    memory = np.zeros(9 * PIECE, np.uint8)

    future = helped.start(descriptor, memory)

    for _ in range(THREADS):
        assert log.begun.acquire(timeout=WAIT_S)
    log.held[descriptor].set()
    assert future.result(WAIT_S) == 9 * PIECE
    assert memory.tobytes() == content
    assert len(log.pieces) == 9


def test_threads_whose_own_file_is_read_are_made_up_for(
    helped: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    small = [helped.add(PIECE)[0] for _ in range(THREADS - 1)]
    large = helped.add(9 * PIECE)[0]
    gates = {descriptor: threading.Event() for descriptor in (*small, large)}
    log.held = gates
    futures = [helped.start(descriptor, np.zeros(PIECE, np.uint8)) for descriptor in small]
    futures.append(helped.start(large, np.zeros(9 * PIECE, np.uint8)))
    for _ in range(THREADS):
        assert log.begun.acquire(timeout=WAIT_S)

    for descriptor in small:
        gates[descriptor].set()

    for _ in range(THREADS - 1):
        assert log.begun.acquire(timeout=WAIT_S)
    gates[large].set()
    assert [future.result(WAIT_S) for future in futures] == [PIECE] * (THREADS - 1) + [9 * PIECE]


def test_nobody_is_asked_to_help_where_each_thread_has_a_file_of_its_own(
    helped: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    gate = threading.Event()
    descriptors = [helped.add(PIECE)[0] for _ in range(THREADS)]
    log.held = dict.fromkeys(descriptors, gate)

    futures = [helped.start(descriptor, np.zeros(PIECE, np.uint8)) for descriptor in descriptors]

    for _ in range(THREADS):
        assert log.begun.acquire(timeout=WAIT_S)
    gate.set()
    assert [future.result(WAIT_S) for future in futures] == [PIECE] * THREADS
    assert helped.asked == 0


def test_no_read_is_left_early_because_help_cannot_be_asked_for(
    helped: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    descriptor = helped.add(5 * PIECE)[0]
    refused = MemoryError("none left")

    def ask(call: Callable[[], None]) -> None:
        raise refused

    reads = ParallelReads(PIECE, threads=THREADS, start_helper=ask)

    assert reads.read(0, descriptor, np.zeros(5 * PIECE, np.uint8).data) == 5 * PIECE
    assert len(log.pieces) == 5


def test_a_file_is_read_where_nobody_helps_any_more(helped: Files) -> None:
    assert helped.helpers is not None
    helped.helpers.shutdown()
    descriptor, content = helped.add(5 * PIECE)
    memory = np.zeros(5 * PIECE, np.uint8)

    assert helped.start(descriptor, memory).result(WAIT_S) == 5 * PIECE
    assert memory.tobytes() == content


def test_whatever_breaks_in_a_helper_is_told_to_the_reader(
    helped: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)

    def fail(descriptor: int, offset: int) -> None:
        if offset == 3 * PIECE:
            raise MemoryError("none left")

    log.fail = fail
    descriptor = helped.add(5 * PIECE)[0]

    with pytest.raises(MemoryError, match="none left"):
        helped.start(descriptor, np.zeros(5 * PIECE, np.uint8)).result(WAIT_S)


def test_an_error_is_the_read_s_own_though_another_thread_met_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    bad, good = files.add(6 * PIECE)[0], files.add(6 * PIECE)[0]

    def fail(descriptor: int, offset: int) -> None:
        if descriptor == bad and offset >= 2 * PIECE:
            raise OSError(errno.EIO, "broken")

    log.fail = fail
    futures = [files.start(descriptor, np.zeros(6 * PIECE, np.uint8)) for descriptor in (bad, good)]

    with pytest.raises(OSError, match="broken"):
        futures[0].result(WAIT_S)
    assert futures[1].result(WAIT_S) == 6 * PIECE


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_nobody_s_when_the_read_has_ended(
    any_files: Files, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    files = any_files
    log = Log(monkeypatch)
    descriptors = [files.add(5 * PIECE)[0] for _ in range(4)]

    def fail(descriptor: int, offset: int) -> None:
        if fails and offset == 3 * PIECE:
            raise OSError(errno.EIO, "broken")

    log.fail = fail
    gc.collect()
    gc.disable()  # nothing may wait for a collection
    try:
        memories = [np.zeros(5 * PIECE, np.uint8) for _ in descriptors]
        gone = [weakref.ref(memory) for memory in memories]
        futures = [files.start(fd, memory) for fd, memory in zip(descriptors, memories, strict=True)]
        memories.clear()
        for future in futures:
            error = future.exception(WAIT_S)
            assert (error is not None) == fails
            if error is not None:
                error.with_traceback(None)
        del futures, future
        files.shut()  # threads know their last call until they have ended
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()
