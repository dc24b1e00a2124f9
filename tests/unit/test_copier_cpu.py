"""The copier of a cache in host memory, and the rules that every copier keeps."""

from __future__ import annotations

import asyncio
import mmap
import re
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.device import cpu, open_copiers
from lmcache_async.device import rows as row_copies
from lmcache_async.device.copier import CopyJob
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.progress import LoadProgress
from lmcache_async.errors import EngineClosedError
from lmcache_async.memory.copies import compiled
from lmcache_async.testing.caches import CacheForm, cache_forms
from lmcache_async.testing.steps import turns
from tests.support.caches import assign, job_of


@pytest.fixture(autouse=True, scope="module", params=sorted({None, compiled}, key=str))
def way(request):
    """Copy rows with the compiled module, or with NumPy as on systems without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_copies, "compiled", request.param)
        patch.setattr(cpu, "compiled", request.param)
        yield


def copy_jobs(layout, *rows):
    return [job_of(layout, some) for some in rows]


async def transfer(source, target, rows, target_rows, *, threads=2):
    """Gather `rows` of one cache and scatter them into another; one job for each list of rows."""
    copier, other = CpuCopier(source.layout, threads=threads), CpuCopier(target.layout, threads=threads)
    jobs = copy_jobs(source.layout, *rows)
    await copier.gather(jobs)
    await other.scatter(
        [CopyJob(np.array(some), job.payload) for some, job in zip(target_rows, jobs, strict=True)]
    )
    copier.close()
    other.close()
    return jobs


@given(st.data(), cache_forms(granularities=("block",)), st.integers(1, 3))
def test_each_shard_of_the_heads_moves_between_a_cache_of_all_heads_and_one_of_its_own(data, form, shards):
    whole_form = replace(form, heads=form.heads * shards, all_heads=0, first_head=0)
    own_form = replace(form, all_heads=form.heads, first_head=0)
    whole, back = whole_form.build(3), whole_form.build(4, seed=1)
    expected = whole_form.build(4, seed=1)
    rows, own_rows, back_rows = ([data.draw(st.permutations(range(3)))[:2]] for _ in range(3))
    assign(expected, back_rows[0], whole, rows[0])

    for shard in range(shards):
        own = own_form.build(3, seed=2)
        asyncio.run(transfer(shard_of(whole, shard, form.heads), own, rows, own_rows))
        asyncio.run(transfer(own, shard_of(back, shard, form.heads), own_rows, back_rows))

        alone = own_form.build(3, seed=2)
        assign(alone, own_rows[0], shard_of(whole, shard, form.heads), rows[0])
        assert all(map(torch.equal, own.storages, alone.storages))
    assert all(map(torch.equal, back.storages, expected.storages))


def shard_of(cache, shard, heads):
    """Some heads of a cache, in the same memory."""
    form = replace(cache.form, heads=heads, all_heads=cache.form.heads, first_head=shard * heads)
    tensors = tuple(tensor.narrow(1, form.first_head, heads) for tensor in cache.tensors)
    return replace(cache, form=form, tensors=tensors)


@given(st.data(), cache_forms())
def test_gather_then_scatter_moves_the_rows_and_no_other_byte(data, form):
    source, target = (
        form.build(data.draw(st.integers(1, 5))),
        form.build(data.draw(st.integers(1, 5)), seed=1),
    )
    count = min(source.layout.num_rows, target.layout.num_rows)
    rows = data.draw(st.permutations(range(source.layout.num_rows)))[:count]
    target_rows = data.draw(st.permutations(range(target.layout.num_rows)))[:count]
    if data.draw(st.booleans()):
        rows, target_rows = sorted(rows), sorted(target_rows)
    skipped = data.draw(st.sets(st.integers(0, count - 1)))
    target_rows = [-1 if index in skipped else row for index, row in enumerate(target_rows)]
    expected = form.build(target.num_blocks, seed=1)
    assign(expected, target_rows, source, rows)
    before = source.snapshot()
    edges = sorted(data.draw(st.lists(st.integers(0, count), max_size=2)))
    parts = list(zip([0, *edges], [*edges, count], strict=True))

    with pytest.MonkeyPatch.context() as patch:
        # Small enough for these caches to use every copy method, and several threads.
        patch.setattr(cpu, "MIN_THREAD_BYTES", 1)
        patch.setattr(cpu, "STREAM_BYTES", data.draw(st.sampled_from((1, 1 << 30))))
        patch.setattr(row_copies, "LARGE_ROW_BYTES", data.draw(st.sampled_from((1, 64, 1 << 20))))
        patch.setattr(row_copies, "LONG_RUN_BYTES", data.draw(st.sampled_from((1, 256, 1 << 20))))
        patch.setattr(row_copies, "STEP_BYTES", data.draw(st.sampled_from((1, 1 << 20))))
        asyncio.run(
            transfer(
                source,
                target,
                [rows[low:high] for low, high in parts],
                [target_rows[low:high] for low, high in parts],
                threads=data.draw(st.integers(1, 3)),
            )
        )

    assert all(map(torch.equal, target.storages, expected.storages))
    assert all(map(torch.equal, source.storages, before))


LONG_S = 60  # only a hang takes so long


class Told(LoadProgress):
    """Records the calls of `advance`."""

    def __init__(self, num_planes):
        super().__init__(num_planes)
        self.told = []

    def advance(self, planes):
        self.told.append(planes)
        super().advance(planes)


def plane_rows(cache, plane, rows):
    """The bytes of the rows in one plane."""
    storage = cache.storages[plane.storage]
    return [storage[plane.start(row) : plane.start(row) + plane.row_bytes] for row in rows if row >= 0]


def wait_and_compare(progress, cache, expected, rows, step):
    """Wait for more and more planes like a model, and return the planes with wrong content."""
    wrong = []
    planes = cache.layout.planes
    for first in range(0, len(planes), step):
        progress.wait(first + step, deadline=time.monotonic() + LONG_S)
        for index, plane in enumerate(planes[first : first + step], first):
            pairs = zip(plane_rows(cache, plane, rows), plane_rows(expected, plane, rows), strict=True)
            if not all(torch.equal(found, right) for found, right in pairs):
                wrong.append(index)
    return wrong


async def scatter_while_waiting(copier, jobs, progress, waiter):
    """Scatter while `waiter` runs in another thread, and return its result."""
    assert progress.begin()
    waiting = asyncio.ensure_future(asyncio.to_thread(waiter))
    try:
        await copier.scatter(jobs, None, progress)
    finally:
        progress.end()
        copier.close()
        result = await waiting
    return result


@given(
    form=cache_forms(),
    blocks=st.integers(1, 5),
    rows=st.lists(st.integers(-1, 19), max_size=12, unique_by=lambda row: row if row >= 0 else object()),
    edges=st.lists(st.integers(0, 12), max_size=2).map(sorted),
    threads=st.integers(1, 3),
    helpers=st.integers(0, 3),
    part_bytes=st.sampled_from((1, 64, 500, 1 << 20)),
    step=st.one_of(st.none(), st.integers(1, 3)),
)
def test_a_scatter_with_progress_moves_the_same_bytes_and_reports_no_plane_too_early(
    form, blocks, rows, edges, threads, helpers, part_bytes, step
):
    source, target, expected = form.build(blocks), form.build(blocks, seed=1), form.build(blocks, seed=1)
    rows = [row for row in rows if row < source.layout.num_rows]
    assign(expected, rows, source, rows)
    filled = copy_jobs(
        source.layout, *(rows[low:high] for low, high in zip([0, *edges], [*edges, len(rows)], strict=True))
    )
    gatherer, copier = CpuCopier(source.layout), CpuCopier(target.layout, threads=threads)
    # A thread copies, whether or not another one waits.
    copier._helpers = min(helpers or step is None, threads)
    progress = Told(target.layout.num_planes)

    def waiter():
        return [] if step is None else wait_and_compare(progress, target, expected, rows, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PART_BYTES", part_bytes)
        patch.setattr(cpu, "UNAWAITED_S", 0)
        asyncio.run(gatherer.gather(filled))
        wrong = asyncio.run(scatter_while_waiting(copier, filled, progress, waiter))
    gatherer.close()

    assert wrong == []
    assert all(map(torch.equal, target.storages, expected.storages))
    assert progress.told == sorted(progress.told)
    assert progress.told[-1] == target.layout.num_planes


@pytest.fixture
def layers():
    """A cache of four planes, with a copier that takes two or three rows plane by plane, without threads."""
    cache = CacheForm(layers=4).build(8)
    copier = CpuCopier(cache.layout)
    copier._helpers = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PART_BYTES", 1 << 8)  # a row of a plane has half of that
        patch.setattr(cpu, "UNAWAITED_S", 3600)
        yield cache, copier
    copier.close()


def count_parts(monkeypatch):
    """Threads that copy, one entry for each part."""
    copy, copied_by = CpuCopier._copy, []

    def counted(self, jobs, part, **options):
        copied_by.append(threading.get_ident())
        copy(self, jobs, part, **options)

    monkeypatch.setattr(CpuCopier, "_copy", counted)
    return copied_by


def is_filled(cache, rows):
    return all(
        (held == 0xA5).all() for plane in cache.layout.planes for held in plane_rows(cache, plane, rows)
    )


async def test_without_free_threads_the_waiting_thread_copies(layers, monkeypatch):
    cache, copier = layers
    copied_by = count_parts(monkeypatch)
    progress = Told(4)

    def waiter():
        for planes in range(1, 5):
            progress.wait(planes, deadline=time.monotonic() + LONG_S)
            counts.append(len(copied_by))
        return threading.get_ident()

    counts = []
    thread = await scatter_while_waiting(copier, copy_jobs(cache.layout, [0, 3, 5]), progress, waiter)

    assert copied_by == [thread] * 4
    assert counts == progress.told == [1, 2, 3, 4]  # no more than necessary
    assert is_filled(cache, [0, 3, 5])


async def test_a_plane_of_many_bytes_is_cut_and_every_entry_copied_once(layers, monkeypatch):
    cache, copier = layers
    copier._helpers = 1
    parts = []
    monkeypatch.setattr(CpuCopier, "_copy", lambda self, jobs, part, **options: parts.append(part))
    progress = Told(4)

    await copier.scatter(copy_jobs(cache.layout, range(5)), None, progress)

    entries = [list(range(piece.start, piece.stop)) for part in parts for piece in part]
    assert entries == [[p * 5 + r for r in rows] for p in range(4) for rows in ([0, 1], [2, 3], [4])]
    assert progress.told == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def refuse(call, *args):
    raise RuntimeError("can't start new thread")


async def test_a_load_for_which_no_thread_can_be_started_is_copied(layers, monkeypatch):
    cache, copier = layers
    copier._helpers = 1
    progress = Told(4)
    monkeypatch.setattr(copier._threads.pool, "submit", refuse)

    waiter = partial(progress.wait, 4, deadline=time.monotonic() + LONG_S)
    async with asyncio.timeout(LONG_S):
        await scatter_while_waiting(copier, copy_jobs(cache.layout, [0, 3]), progress, waiter)

    assert progress.told == [1, 2, 3, 4]
    assert is_filled(cache, [0, 3])


async def test_a_bug_in_a_copy_is_not_taken_for_a_thread_that_cannot_be_started(layers, monkeypatch):
    cache, copier = layers

    def fail(self, jobs, part, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(CpuCopier, "_copy", fail)
    monkeypatch.setattr(copier._threads, "queue", None)

    with pytest.raises(RuntimeError, match="a bug"):
        await copier.gather(copy_jobs(cache.layout, [0]))


@pytest.mark.parametrize("submit", [refuse, lambda call, *args: call(*args)], ids=["refused", "at once"])
async def test_a_load_that_no_thread_waits_for_is_copied(layers, monkeypatch, submit):
    cache, copier = layers
    progress = Told(4)
    progress.begin()
    monkeypatch.setattr(cpu, "UNAWAITED_S", 0)
    monkeypatch.setattr(copier._threads.pool, "submit", submit)

    loading = asyncio.ensure_future(copier.scatter(copy_jobs(cache.layout, [0, 3]), None, progress))
    await turns(20)

    assert loading.done()
    assert progress.told == [1, 2, 3, 4]
    assert is_filled(cache, [0, 3])


async def test_cancellation_withdraws_an_unstarted_load(layers):
    cache, copier = layers
    before = cache.snapshot()
    progress = Told(4)
    progress.begin()
    loading = asyncio.ensure_future(copier.scatter(copy_jobs(cache.layout, [0, 3]), None, progress))
    await asyncio.sleep(0)

    loading.cancel()
    await asyncio.wait({loading}, timeout=LONG_S)
    withdrawn = loading.cancelled()
    progress._worker(4)  # the waiting thread calls it only now

    assert withdrawn
    assert progress.told == []
    assert all(map(torch.equal, cache.storages, before))


@pytest.mark.parametrize("helpers", [0, 1])  # either the waiting thread or a helper copies
async def test_cancelled_a_load_withdraws_the_rest_and_waits_for_the_part_that_runs(
    layers, monkeypatch, helpers
):
    cache, copier = layers
    copier._helpers = helpers
    started, go_on, ended = threading.Event(), threading.Event(), []

    def slow_copy(self, jobs, part, **options):
        started.set()
        go_on.wait(LONG_S)
        ended.append(part)

    monkeypatch.setattr(CpuCopier, "_copy", slow_copy)
    progress = Told(4)
    progress.begin()
    loading = asyncio.ensure_future(copier.scatter(copy_jobs(cache.layout, [0, 3]), None, progress))
    await asyncio.sleep(0)
    help_it = started.wait if helpers else partial(progress.wait, 4, deadline=time.monotonic())
    helping = asyncio.ensure_future(asyncio.to_thread(help_it))
    await asyncio.to_thread(started.wait, LONG_S)

    for _ in range(3):
        loading.cancel()
        await asyncio.sleep(0)
    assert not loading.done()
    assert ended == []
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    progress.end()
    await helping

    assert len(ended) == 1
    assert progress.told == []


@pytest.mark.parametrize("helpers", [0, 1])
async def test_nothing_keeps_the_payload_of_a_load_that_has_ended(layers, helpers, collector_off):
    cache, copier = layers
    copier._helpers = helpers
    jobs = copy_jobs(cache.layout, [0, 3])
    gone = weakref.ref(jobs[0].payload)
    progress = Told(4)
    progress.begin()
    waiting = asyncio.ensure_future(asyncio.to_thread(progress.wait, 4, deadline=time.monotonic() + LONG_S))
    await copier.scatter(jobs, None, progress)

    del jobs
    assert gone() is None
    await waiting


@pytest.mark.parametrize("helpers", [None, 0, 1])  # not layer by layer; or with so many threads of the copier
async def test_nothing_keeps_the_payload_of_a_load_that_has_failed(
    layers, helpers, collector_off, monkeypatch
):
    def fail(self, jobs, part, **options):
        raise OSError("the copy failed")

    monkeypatch.setattr(CpuCopier, "_copy", fail)
    cache, copier = layers
    monkeypatch.setattr(copier._threads, "queue", None)  # its copies cannot fail
    copier._helpers = helpers or 0
    jobs = copy_jobs(cache.layout, [0, 3])
    gone = weakref.ref(jobs[0].payload)
    progress = Told(4)
    progress.begin()
    waiting = asyncio.ensure_future(asyncio.to_thread(progress.wait, 4, deadline=time.monotonic() + LONG_S))
    with pytest.raises(OSError, match="the copy failed"):
        await copier.scatter(jobs, None, None if helpers is None else progress)
    progress.end()
    await waiting

    del jobs
    assert gone() is None


@given(cache_forms(), st.data())
def test_gather_leaves_the_payload_of_skipped_rows_alone(form, data):
    layout = form.build(3).layout
    rows = data.draw(st.lists(st.sampled_from([-1, *range(layout.num_rows)]), min_size=1, max_size=6))
    job, filled = copy_jobs(layout, rows, [max(row, 0) for row in rows])
    copier = CpuCopier(layout, threads=1)

    asyncio.run(copier.gather([job, filled]))
    copier.close()

    place = 0
    for plane in layout.planes:
        for row in rows:
            span = slice(place, place + plane.row_bytes)
            expected = filled.payload[span] if row >= 0 else np.full(plane.row_bytes, 0xA5, np.uint8)
            assert np.array_equal(job.payload[span], expected)
            place += plane.row_bytes


async def test_a_payload_is_plane_by_plane():
    cache = CacheForm(order="LBNHC", layers=2).build(6)
    (copier,) = open_copiers([cache.layout])
    (job,) = copy_jobs(cache.layout, [4, 1])

    await copier.gather([job])
    copier.close()

    pages = [tensor[row].transpose(0, 1).contiguous() for tensor in cache.tensors for row in (4, 1)]
    assert job.payload.tobytes() == b"".join(page.view(torch.uint8).numpy().tobytes() for page in pages)


@pytest.mark.parametrize("direction", ["gather", "scatter", "scatter in order"])
@pytest.mark.parametrize(
    ("rows", "payload", "message"),
    [
        (np.array([0, 6]), np.zeros(512, np.uint8), "row 6 is out of bounds; the cache has rows 0 to 5"),
        (np.array([0, -2]), np.zeros(512, np.uint8), "row -2"),
        (np.array([0, 1]), np.zeros(511, np.uint8), r"shape \(512,\)"),
        (np.array([0, 1]), np.zeros(128, np.int32), "uint8"),
        (np.array([0, 1]), np.zeros(1024, np.uint8)[::2], "contiguous"),
        (np.array([[0, 1]]), np.zeros(512, np.uint8), "rows must be"),
        (np.array([0.0, 1.0]), np.zeros(512, np.uint8), "rows must be"),
        (np.array([0, 2**64 - 1], np.uint64), np.zeros(512, np.uint8), "rows must be"),
    ],
)
async def test_a_wrong_job_moves_nothing_of_its_batch(direction, rows, payload, message):
    cache = CacheForm(layers=2, dtype=torch.float16).build(6)
    before = cache.snapshot()
    copier = CpuCopier(cache.layout)
    (good,) = copy_jobs(cache.layout, [2, 3])
    progress = Told(cache.layout.num_planes)
    options = {"progress": progress} if direction == "scatter in order" else {}

    with pytest.raises(ValueError, match=message):
        await getattr(copier, direction.split()[0])([good, CopyJob(rows, payload)], **options)
    copier.close()

    assert progress.told == []
    assert (good.payload == 0xA5).all()
    assert all(map(torch.equal, cache.storages, before))


async def test_a_memoryview_is_a_payload_and_a_read_only_one_can_be_scattered():
    cache = CacheForm().build(6)
    copier = CpuCopier(cache.layout)
    memory = bytearray(cache.layout.payload_bytes(2))
    rows = np.array([3, 5])

    await copier.gather([CopyJob(rows, memoryview(memory))])
    await copier.scatter([CopyJob(np.array([0, 1]), memoryview(bytes(memory)))])
    with pytest.raises(ValueError, match="read-only"):
        await copier.gather([CopyJob(rows, memoryview(bytes(memory)))])
    copier.close()

    assert torch.equal(cache.tensors[1][:2].view(torch.uint8), cache.tensors[1][[3, 5]].view(torch.uint8))


async def test_a_chunk_is_one_piece_for_layers_in_separate_storages(monkeypatch):
    """Python work on the event loop does not grow with the number of layers."""
    layout = CacheForm(layers=6, separate=True).build(8).layout
    pieces = []
    monkeypatch.setattr(cpu, "compiled", None)  # otherwise the compiled module gets the pieces
    monkeypatch.setattr(cpu, "copy_rows", lambda rows, **_: pieces.extend(rows))
    copier = CpuCopier(layout, threads=1)

    await copier.gather([job_of(layout, [0, 1]), job_of(layout, [2, 3])])
    copier.close()

    assert len(layout.storages) == 6
    assert len(pieces) == 2


def test_rows_beyond_their_storage_are_refused():
    layout = CacheForm(separate=True).build(8).layout

    with pytest.raises(ValueError, match=r"beyond the \d+ bytes of their storage"):
        CpuCopier(replace(layout, num_blocks=9))


async def test_a_closed_copier_refuses():
    copier = CpuCopier(CacheForm().build(2).layout)
    copier.close()
    copier.close()

    for call in (copier.gather, copier.scatter, partial(copier.scatter, progress=Told(2))):
        with pytest.raises(EngineClosedError):
            await call(copy_jobs(copier.layout, [0]))
    assert copier.fence() is None  # in host memory work is complete when the call returns


async def test_copiers_of_several_layouts_share_threads():
    caches = [CacheForm(layers=layers).build(4, seed=layers) for layers in (1, 2, 3)]
    before = set(threading.enumerate())
    copiers = open_copiers([cache.layout for cache in caches], threads=2)
    jobs = [copy_jobs(cache.layout, [3, 1]) for cache in caches]

    await asyncio.gather(*(copier.gather(some) for copier, some in zip(copiers, jobs, strict=True)))
    started = set(threading.enumerate()) - before
    for copier in copiers:
        copier.close()

    assert len(started) <= 2
    for cache, (job,) in zip(caches, jobs, strict=True):
        reference = CpuCopier(cache.layout)
        (expected,) = copy_jobs(cache.layout, [3, 1])
        await reference.gather([expected])
        reference.close()
        assert np.array_equal(job.payload, expected.payload)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_huge_pages_for_the_kv_cache(huge_pages):
    # Not memory of malloc, which may be in a part of the heap that another test has advised before.
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(1 << 10, 2, 16, 512)
    layout = KVLayout.from_block_views([tensor], num_blocks=1 << 10, block_size=16)
    for copier in open_copiers([layout], huge_pages=huge_pages):
        copier.close()

    assert ("hg" in _mapping_flags(tensor.data_ptr() + tensor.nbytes // 2)) == huge_pages


def _mapping_flags(address):
    """The kernel's flags of the mapping that contains `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_other_devices_have_no_copier():
    with pytest.raises(ValueError, match="meta"):
        open_copiers([CacheForm().build(2, device="meta").layout])


async def test_cancellation_waits_for_the_copy_that_runs_and_withdraws_the_rest(monkeypatch):
    monkeypatch.setattr(cpu, "compiled", None)
    copier = CpuCopier(CacheForm().build(8).layout, threads=1)
    started, go_on, ended = threading.Event(), threading.Event(), []

    def slow_copy(self, jobs, part, **options):
        started.set()
        go_on.wait()
        ended.append(part)

    monkeypatch.setattr(CpuCopier, "_copy", slow_copy)
    running = asyncio.ensure_future(copier.gather(copy_jobs(copier.layout, [0])))
    await asyncio.to_thread(started.wait)
    queued = asyncio.ensure_future(copier.gather(copy_jobs(copier.layout, [1])))
    await asyncio.sleep(0)
    running.cancel()
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    running.cancel()
    await asyncio.sleep(0)

    assert not running.done()
    assert ended == []
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    copier.close()
    assert len(ended) == 1


async def test_an_unstarted_load_fails_when_the_copier_is_closed(monkeypatch):
    monkeypatch.setattr(cpu, "UNAWAITED_S", 0)
    cache = CacheForm().build(4)
    copier = CpuCopier(cache.layout, threads=1)
    copier._helpers = 0
    before = cache.snapshot()
    (job,) = copy_jobs(cache.layout, [1, 2])
    scatter = asyncio.ensure_future(copier.scatter([job], None, LoadProgress(cache.layout.num_planes)))
    await asyncio.sleep(0)
    copier.close()
    await turns(20)

    assert scatter.done()
    with pytest.raises(EngineClosedError):
        await scatter
    assert all(map(torch.equal, cache.storages, before))
