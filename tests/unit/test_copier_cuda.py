"""The GPU copier over fake streams and events; its device memory is host memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import traceback
import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_async.device import cuda
from lmcache_async.device.copier import CopyJob, Fence
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.device.cuda import (
    FenceThread,
    Lane,
    LaneStatistics,
    TorchStreams,
    open_cuda_copiers,
)
from lmcache_async.device.movers import TorchMover, open_mover
from lmcache_async.errors import EngineClosedError
from lmcache_async.testing.caches import CacheForm, cache_forms
from lmcache_async.testing.steps import turns
from tests.support.caches import assign, check_rows_of_two_sizes, job_of
from tests.support.fake_streams import FakeEvent, FakeStreams, QueuedStreams


class LoggedMover(TorchMover):
    """Torch's mover, which logs its calls in the streams' log and fails on request."""

    def __init__(self, layout, streams):
        super().__init__(layout)
        self.streams = streams
        self.fails_at = None

    def move(self, steps, table, staging, *, to_staging):
        what = "gather" if to_staging else "scatter"
        self.streams.log.append((what, 0))
        if self.fails_at == sum(entry == (what, 0) for entry in self.streams.log):
            raise RuntimeError("launch failed")
        super().move(steps, table, staging, to_staging=to_staging)


def fake_copier(cache, *, staging_bytes=1 << 20):
    layout, streams = cache.layout, FakeStreams()
    movers = [LoggedMover(layout, streams)]
    (copier,) = open_cuda_copiers([layout], staging_bytes=staging_bytes, streams=streams, movers=movers)
    return copier, streams


def all_free(copier):
    return all(ring.free == ring.parts and ring.waiting == 0 for ring in copier.statistics())


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@given(st.data(), cache_forms())
def test_payloads_are_those_of_the_cpu_copier_and_scatter_touches_no_other_byte(data, form):
    source, target = form.build(4), form.build(3, seed=1)
    lists = st.lists(st.integers(-1, source.layout.num_rows - 1), max_size=4)
    rows = data.draw(st.lists(lists, max_size=3))
    count = sum(map(len, rows))
    free = iter(data.draw(st.permutations(range(target.layout.num_rows))) + [-1] * count)
    target_rows = [
        [next(free) if row >= 0 and data.draw(st.booleans()) else -1 for row in some] for some in rows
    ]
    expected = form.build(3, seed=1)
    for some, there in zip(rows, target_rows, strict=True):
        assign(expected, there, source, some)

    async def run():
        reference = CpuCopier(source.layout)
        copiers = [
            fake_copier(cache, staging_bytes=data.draw(st.integers(1, 4096)))[0] for cache in (source, target)
        ]
        jobs, wanted = ([job_of(source.layout, some) for some in rows] for _ in range(2))
        await copiers[0].gather(jobs)
        await reference.gather(wanted)
        assert all(np.array_equal(job.payload, want.payload) for job, want in zip(jobs, wanted, strict=True))
        await copiers[1].scatter(
            [
                CopyJob(np.array(there, np.int64), job.payload)
                for there, job in zip(target_rows, jobs, strict=True)
            ]
        )
        for copier in (reference, *copiers):
            copier.close()
        assert all(map(all_free, copiers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "MAX_ENTRIES", data.draw(st.sampled_from((1, 5, 1 << 17))))
        asyncio.run(run())
    assert all(map(torch.equal, target.storages, expected.storages))


class QueuedMover(TorchMover):
    """Torch's mover, whose work is queued."""

    def __init__(self, layout, streams):
        super().__init__(layout)
        self.streams = streams

    def move(self, *arguments, to_staging):
        self.streams.submit(partial(super().move, *arguments, to_staging=to_staging))


class Traffic:
    """Concurrent copies whose memory is used again at once when they end, before and after any of their work."""

    def __init__(self, form, seed):
        self.random = random.Random(seed)
        self.layout = form.build(12).layout
        self.streams = QueuedStreams(self.random)
        (self.copier,) = open_cuda_copiers(
            [self.layout],
            staging_bytes=self.random.choice([1, 200, 5000]),
            streams=self.streams,
            movers=[QueuedMover(self.layout, self.streams)],
        )
        self.used_again = []

    def spans(self, rows):
        """Return views of all rows, in the order of a payload."""
        memories = [storage.numpy() for storage in self.layout.storages]
        for plane in self.layout.planes:
            for start in map(plane.start, rows):
                yield memories[plane.storage][start : start + plane.row_bytes]

    def write(self, rows, content):
        at = 0
        for span in self.spans(rows):
            span[:] = content[at : at + len(span)]
            at += len(span)

    def read(self, rows):
        return np.concatenate(list(self.spans(rows)))

    def content(self, rows):
        return np.frombuffer(self.random.randbytes(self.layout.payload_bytes(len(rows))), np.uint8)

    async def copy(self, rows):
        content, stores = self.content(rows), self.random.random() < 0.5
        job = CopyJob(np.array(rows), self.content(rows).copy() if stores else content.copy())
        before = self.read(rows)
        # Work of the model before the fence: it writes what is stored, and reads what a load replaces.
        if stores:
            self.streams.submit(lambda: self.write(rows, content))
        else:
            self.streams.submit(lambda: np.testing.assert_array_equal(self.read(rows), before))
        fence = self.copier.fence()
        try:
            await (self.copier.gather if stores else self.copier.scatter)([job], fence)
            np.testing.assert_array_equal(job.payload if stores else self.read(rows), content)
        finally:
            await until(fence.reached)
            later = self.content(rows)
            job.payload[:] = later
            self.write(rows, later)
            self.used_again.append((job.payload, rows, later))

    async def run(self):
        for _ in range(2):
            rows = self.random.sample(range(self.layout.num_rows), self.layout.num_rows)
            copies = [asyncio.ensure_future(self.copy(some)) for some in (rows[:4], rows[4:7], rows[7:9])]
            cancelled = self.random.choice([None, *copies])
            try:
                while not all(copy.done() for copy in copies):
                    self.streams.run_one()
                    await asyncio.sleep(0)
                    if cancelled is not None and self.random.random() < 0.1:
                        cancelled.cancel()
            except AssertionError:  # of some work; without the other work the copies would not end
                while not all(copy.done() for copy in copies):
                    with contextlib.suppress(AssertionError):
                        self.streams.run_one()
                    await asyncio.sleep(0)
                raise
            for copy in copies:
                with (
                    contextlib.suppress(asyncio.CancelledError)
                    if copy is cancelled
                    else contextlib.nullcontext()
                ):
                    copy.result()
            for payload, rows, later in self.used_again:
                np.testing.assert_array_equal(payload, later)
                np.testing.assert_array_equal(self.read(rows), later)
            self.used_again.clear()
        self.copier.close()


@settings(max_examples=40)
@given(cache_forms(), st.integers(0, 1 << 32))
def test_copies_that_run_late_and_in_any_order_use_only_their_own_memory(form, seed):
    asyncio.run(Traffic(form, seed).run())


@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
async def test_rows_of_two_sizes_are_copied(staging_bytes):
    def open_copier(layout):
        movers = [TorchMover(layout)]
        (copier,) = open_cuda_copiers(
            [layout], staging_bytes=staging_bytes, streams=FakeStreams(), movers=movers
        )
        return copier

    await check_rows_of_two_sizes(open_copier)


async def test_a_copier_that_is_opened_in_inference_mode_copies_outside_of_it(monkeypatch):
    monkeypatch.setattr(cuda, "open_mover", TorchMover)
    with torch.inference_mode():
        layout = CacheForm().build(4).layout
        (copier,) = open_cuda_copiers([layout], streams=FakeStreams())
    job = job_of(layout, [1, 2])

    await copier.gather([job])
    await copier.scatter([CopyJob(np.array([3, 0]), job.payload)])
    copier.close()

    memory = layout.storages[0]
    plane = layout.planes[0]
    assert torch.equal(*(memory[plane.start(row) : plane.start(row) + plane.row_bytes] for row in (1, 3)))


@pytest.mark.parametrize("way", ["gather", "scatter"])
async def test_a_copy_is_submitted_to_one_stream_when_its_fence_is_reached(way):
    copier, streams = fake_copier(CacheForm().build(4))
    gate = streams.close_gate()
    fence = copier.fence()
    streams.close_gate().set()
    streams.log.clear()

    copying = asyncio.ensure_future(getattr(copier, way)([job_of(copier.layout, [1, 2])], fence))
    await turns(5)
    assert streams.log == []
    gate.set()
    await copying
    copier.close()

    assert [what for what, _ in streams.log] == ["use", way, "record"]
    assert len({stream for what, stream in streams.log if what != way}) == 1


@pytest.mark.parametrize("way", ["gather", "scatter"])
async def test_the_thread_of_a_lane_spins_for_the_last_part_of_a_copy(way):
    cache = CacheForm().build(8)
    row_bytes = cache.layout.payload_bytes(1)
    copier, streams = fake_copier(cache, staging_bytes=4 * row_bytes)
    jobs = [job_of(copier.layout, [row, row + 1]) for row in range(0, 6, 2)]

    await getattr(copier, way)(jobs)
    assert streams.spins == [False] * (len(streams.spins) - 1) + [True]
    assert len(streams.spins) > 3


@pytest.mark.parametrize(("way", "spins"), [("gather", False), ("scatter", True)])
async def test_the_thread_of_a_lane_spins_for_a_load_of_one_part_but_not_for_a_store(way, spins):
    copier, streams = fake_copier(CacheForm().build(4))

    await getattr(copier, way)([job_of(copier.layout, [1, 2])])
    assert streams.spins == [spins]


@pytest.mark.parametrize("way", ["gather", "scatter"])
async def test_a_copy_ends_after_its_stream_if_no_event_can_be_recorded(way, monkeypatch):
    """Its slab and its staging memory must not be used again before."""
    copier, streams = fake_copier(CacheForm().build(4))
    gate = streams.close_gate()

    def fails(*_, **__):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(streams, "record", fails)
    copying = asyncio.ensure_future(getattr(copier, way)([job_of(copier.layout, [1, 2])]))
    await turns(20)

    assert not copying.done()
    assert not all_free(copier)
    gate.set()
    await copying
    assert all_free(copier)
    assert streams.log[-1][0] == "end"


async def test_copies_of_a_fence_are_awaited_after_an_error_that_does_not_last():
    answers = iter([False, RuntimeError("busy"), False, False, True])

    def reached(_):
        answer = next(answers, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    thread = FenceThread("fences", reached, contextlib.nullcontext)
    fence = object()
    first, second = thread.watch(fence), thread.watch(fence)

    with pytest.raises(RuntimeError, match="busy"):
        await first
    await second
    thread.close()


async def test_a_copy_without_jobs_submits_nothing():
    copier, streams = fake_copier(CacheForm().build(4))
    streams.close_gate()

    await copier.gather([], copier.fence())
    await copier.scatter([], copier.fence())
    assert streams.spins == []


async def test_a_wrong_job_is_refused_before_its_fence_is_reached():
    copier, streams = fake_copier(CacheForm().build(4))
    streams.close_gate()

    with pytest.raises(ValueError, match="row 9"):
        await copier.gather([job_of(copier.layout, [1])._replace(rows=np.array([9]))], copier.fence())


async def test_copies_without_a_pending_fence_pass_one_that_waits_for_its_fence():
    copier, streams = fake_copier(CacheForm().build(4))
    gate = streams.close_gate()
    fence = copier.fence()
    streams.close_gate().set()
    jobs = [job_of(copier.layout, [1, 2])]
    waiting = asyncio.ensure_future(copier.gather(jobs, fence))
    await turns(1)

    await copier.gather(jobs)
    await copier.gather(jobs, copier.fence())
    await copier.scatter(jobs, copier.fence())

    assert not waiting.done()
    gate.set()
    await waiting
    copier.close()


async def test_a_copy_does_not_wait_for_a_later_fence_for_which_another_copy_waited_first():
    copier, streams = fake_copier(CacheForm().build(4))
    jobs = [job_of(copier.layout, [1, 2])]
    gates, fences = [], []
    for _ in range(2):
        gates.append(streams.close_gate())
        fences.append(copier.fence())
    streams.close_gate().set()
    later = asyncio.ensure_future(copier.gather(jobs, fences[1]))
    await turns(1)
    earlier = asyncio.ensure_future(copier.scatter(jobs, fences[0]))
    await turns(1)

    gates[0].set()
    await earlier

    assert not later.done()
    gates[1].set()
    await later
    copier.close()


async def test_a_fence_of_many_copies_is_polled_once_for_all_of_them():
    polled: list[Fence] = []
    fences = [FakeEvent(threading.Event()) for _ in range(2)]

    def reached(fence: Fence) -> bool:
        polled.append(fence)
        return len(polled) > 200

    thread = FenceThread("fences", reached, contextlib.nullcontext)
    await asyncio.gather(*(thread.watch(fence) for fence in fences for _ in range(20)))
    thread.close()

    assert all(one is not other for one, other in pairwise(polled[100:200]))


def test_a_fence_is_queried_less_often_the_longer_it_is_awaited():
    waited, interval, queries, latest = 0.0, cuda.MIN_POLL_S, 0, 0.0
    while waited < 0.245:  # a step of 8192 tokens
        interval = cuda.next_poll_s(interval, waited)
        latest = max(latest, interval / max(waited, cuda.SHORT_POLL_S / cuda.LATE))
        waited += interval
        queries += 1

    assert queries < 80
    assert latest <= cuda.LATE
    assert cuda.next_poll_s(interval, 60.0) == cuda.MAX_POLL_S


async def test_a_copy_that_is_cancelled_before_its_fence_is_reached_submits_nothing():
    copier, streams = fake_copier(CacheForm().build(4))
    gate = streams.close_gate()
    fence = copier.fence()
    streams.log.clear()
    copying = asyncio.ensure_future(copier.gather([job_of(copier.layout, [1, 2])], fence))
    await turns(1)

    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    gate.set()
    copier.close()

    assert streams.log == []
    assert all_free(copier)


async def test_an_error_of_the_device_before_a_fence_is_raised():
    copier, streams = fake_copier(CacheForm().build(4))
    streams.error = RuntimeError("illegal address")
    fence = copier.fence()

    with pytest.raises(RuntimeError, match="illegal address"):
        await copier.gather([job_of(copier.layout, [0])], fence)
    copier.close()


async def test_a_copier_closed_while_a_copy_waits_for_its_fence_refuses_it():
    copier, streams = fake_copier(CacheForm().build(4))
    gate = streams.close_gate()
    fence = copier.fence()
    copying = asyncio.ensure_future(copier.gather([job_of(copier.layout, [0])], fence))
    await turns(1)

    gate.set()
    copier.close()

    with pytest.raises(EngineClosedError):
        await copying


async def test_side_streams_wait_for_earlier_users_of_their_memory():
    copier, streams = fake_copier(CacheForm().build(4))
    copier.close()

    assert sorted(streams.log) == [("wait", stream) for stream in range(1, 2 * cuda.PARTS + 1)]


def test_stores_and_loads_have_a_priority_each_and_a_prepared_thread():
    streams = FakeStreams()

    (copier,) = open_cuda_copiers([CacheForm().build(4).layout], load_priority=-1, streams=streams)
    copier.close()

    assert streams.priorities == [0] * cuda.PARTS + [-1] * cuda.PARTS
    assert sorted(streams.prepared) == [f"lmcache-async-{name}" for name in ("fences", "gather", "scatter")]


def test_no_thread_is_left_when_memory_is_missing(monkeypatch):
    streams, before = FakeStreams(), set(threading.enumerate())
    pinned = iter([torch.empty(0)] * (cuda.PARTS + 1))
    monkeypatch.setattr(streams, "pinned", lambda _: next(pinned))  # the second lane gets one table of four

    with pytest.raises(RuntimeError, match="StopIteration"):
        open_cuda_copiers([CacheForm().build(4).layout], streams=streams)

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("started", range(3))
def test_no_thread_is_left_when_one_cannot_be_started(monkeypatch, started):
    before, start, starts = set(threading.enumerate()), threading.Thread.start, itertools.count()

    def start_some(thread):
        if next(starts) == started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(RuntimeError, match="can't start"):
        open_cuda_copiers([CacheForm().build(4).layout], streams=FakeStreams())

    assert set(threading.enumerate()) <= before


def test_the_device_is_current_while_a_stream_is_used_and_restored_by_the_guard_that_makes_no_context(
    monkeypatch,
):
    log = []

    @contextlib.contextmanager
    def noted(what, value):
        log.append((what, value))
        try:
            yield
        finally:
            log.append(("end", what))

    monkeypatch.setattr(torch.cuda, "device", lambda device: noted("device", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device} before")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(("stream", stream)))

    with pytest.raises(KeyError), TorchStreams(torch.device("cuda", 1)).use("side"):
        raise KeyError

    assert log == [
        ("device", 1),
        ("stream", "side"),
        ("stream", "stream of 1 before"),
        ("end", "device"),
    ]


def test_tables_are_in_host_memory_whatever_the_default_device(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: asked.append(options))

    TorchStreams(torch.device("cuda", 1)).pinned(4)

    assert [(each["device"], each["pin_memory"]) for each in asked] == [("cpu", True)]


async def test_copiers_of_several_layouts_share_streams_and_staging():
    """Their rows differ in size, and their movers need tables of different widths."""
    caches = CacheForm(layers=3).build(8), CacheForm(heads=1).build(6, seed=1)
    layouts = [cache.layout for cache in caches]
    streams = FakeStreams()
    movers = [TorchMover(layout) for layout in layouts]
    movers[1].columns = 3
    copiers = open_cuda_copiers(layouts, staging_bytes=1, streams=streams, movers=movers)
    jobs, expected = ([job_of(layout, [3, 0, 5]) for layout in layouts] for _ in range(2))

    await asyncio.gather(*(copier.gather([job]) for copier, job in zip(copiers, jobs, strict=True)))
    for layout, job in zip(layouts, expected, strict=True):
        reference = CpuCopier(layout)
        await reference.gather([job])
        reference.close()
    for copier in copiers:
        copier.close()

    assert [job.payload.tobytes() for job in jobs] == [job.payload.tobytes() for job in expected]
    assert len(streams.priorities) == 2 * 2  # two parts in each direction
    assert all(map(all_free, copiers))


async def test_the_first_close_of_several_copiers_lets_none_submit_work():
    """Work that no thread waits for would still use the payload after the call."""
    layout, streams = CacheForm().build(4).layout, FakeStreams()
    copiers = open_cuda_copiers([layout, layout], streams=streams)
    copiers[0].close()
    streams.log.clear()

    for copier in copiers:
        with pytest.raises(EngineClosedError):
            await copier.gather([job_of(layout, [0])])
        with pytest.raises(EngineClosedError):
            await copier.scatter([job_of(layout, [0])])

    assert not any(what == "use" for what, _ in streams.log)
    assert all(map(all_free, copiers))


async def test_a_closed_copier_keeps_no_staging_memory(collector_off):
    class Mover(TorchMover):
        def move(self, steps, table, staging, *, to_staging):
            gone.extend(map(weakref.ref, (table, staging)))
            super().move(steps, table, staging, to_staging=to_staging)

    gone = []
    layout, streams = CacheForm().build(4).layout, FakeStreams()
    (copier,) = open_cuda_copiers([layout], streams=streams, movers=[Mover(layout)])
    jobs = [job_of(layout, [0])]
    await copier.gather(jobs)
    await copier.scatter(jobs)
    last = asyncio.ensure_future(copier.gather(jobs))
    await turns(1)

    copier.close()
    await last

    assert len(gone) == 6
    assert not any(each() is not None for each in gone)


@pytest.mark.parametrize(("staging_bytes", "expected"), [(1, [128] * 24), (1 << 20, [15 * 128, 9 * 128])])
def test_the_number_of_copies_is_known_in_advance(staging_bytes, expected):
    copier, _ = fake_copier(CacheForm(layers=3).build(8), staging_bytes=staging_bytes)

    copies = copier.copies([5, 3])
    copier.close()

    assert copies == expected


async def test_a_batch_larger_than_the_ring_goes_through_it_in_parts():
    cache = CacheForm(layers=3).build(8)
    row = max(plane.row_bytes for plane in cache.layout.planes)
    copier, streams = fake_copier(cache, staging_bytes=cuda.PARTS * row)
    gate = streams.close_gate()
    job = job_of(cache.layout, range(8))

    gathering = asyncio.ensure_future(copier.gather([job]))
    await until(lambda: copier.statistics()[0].waiting == 1)
    assert len(streams.events) == cuda.PARTS
    gate.set()
    await gathering
    copier.close()

    assert len(streams.events) == 24
    assert all_free(copier)


async def test_staging_holds_a_row_of_any_size_with_two_parts_at_least():
    copier, _ = fake_copier(CacheForm(order="BLHNC").build(4), staging_bytes=1)

    await copier.gather([job_of(copier.layout, [3, 0])])
    copier.close()

    assert copier.statistics()[0].parts == 2


async def test_loads_do_not_wait_for_stores():
    copier, streams = fake_copier(CacheForm().build(4), staging_bytes=1)
    gate = streams.close_gate()
    gathering = asyncio.ensure_future(copier.gather([job_of(copier.layout, [0, 1, 2, 3])]))
    await until(lambda: copier.statistics()[0].waiting == 1)

    streams.close_gate().set()
    await copier.scatter([job_of(copier.layout, [0, 1])])

    assert not gathering.done()
    gate.set()
    await gathering
    copier.close()


@pytest.mark.parametrize("error", [None, RuntimeError("illegal address")])
async def test_a_cancellation_waits_for_submitted_device_work_and_submits_no_more(error):
    """It is raised also if the device fails afterwards."""
    cache = CacheForm(layers=3).build(8)
    copier, streams = fake_copier(cache, staging_bytes=1)
    streams.error = error
    gate = streams.close_gate()
    gathering = asyncio.ensure_future(copier.gather([job_of(cache.layout, range(8))]))
    await until(lambda: copier.statistics()[0].waiting == 1)

    gathering.cancel()
    await until(lambda: copier.statistics()[0].waiting == 0)
    gathering.cancel()
    await turns(5)

    assert not gathering.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert len(streams.events) == 2
    assert all_free(copier)
    copier.close()


async def test_a_launch_that_fails_is_raised_after_all_before_it_has_ended():
    cache = CacheForm(layers=3).build(8)
    copier, streams = fake_copier(cache, staging_bytes=1)
    copier.mover.fails_at = 2
    gate = streams.close_gate()
    gathering = asyncio.ensure_future(copier.gather([job_of(cache.layout, range(8))]))
    await until(lambda: len(streams.events) == 2)

    assert not gathering.done()
    gate.set()
    with pytest.raises(RuntimeError, match="launch failed"):
        await gathering
    assert all_free(copier)
    copier.close()


async def test_an_error_of_the_device_is_raised_and_leaves_the_ring_whole():
    copier, streams = fake_copier(CacheForm().build(8), staging_bytes=1)
    streams.error = RuntimeError("illegal address")

    with pytest.raises(RuntimeError, match="illegal address"):
        await copier.gather([job_of(copier.layout, range(8))])

    assert all_free(copier)
    copier.close()


@pytest.mark.parametrize("fails", ["copy", "fence"])
async def test_nothing_keeps_the_payload_of_a_copy_that_has_failed(fails, collector_off):
    copier, streams = fake_copier(CacheForm().build(8))
    fence = copier.fence()
    streams.error = RuntimeError("illegal address")
    jobs = [job_of(copier.layout, range(8))]
    gone = weakref.ref(jobs[0].payload)

    with pytest.raises(RuntimeError, match="illegal address"):
        await copier.gather(jobs, copier.fence() if fails == "fence" else fence)
    copier.close()
    await turns(1)  # the loop keeps the awaited future until the task yields

    del jobs
    assert gone() is None


@pytest.mark.parametrize("steps", range(4))
async def test_nothing_keeps_the_payload_of_a_copy_that_is_cancelled_after_it_has_failed(
    steps, collector_off
):
    copier, _ = fake_copier(CacheForm().build(8))
    copier.mover.fails_at = 1
    jobs = [job_of(copier.layout, range(8))]
    gone = weakref.ref(jobs[0].payload)
    gathering = asyncio.ensure_future(copier.gather(jobs))
    await turns(1)
    await until(lambda: all_free(copier))

    await turns(steps)
    gathering.cancel()
    with pytest.raises((asyncio.CancelledError, RuntimeError)) as raised:
        await gathering
    copier.close()
    traceback.clear_frames(raised.tb)  # as the runner does

    del jobs
    assert gone() is None


@pytest.mark.parametrize("rows", [[0], []], ids=["copied before", "no rows"])
async def test_an_invalid_job_is_named_and_not_submitted(rows):
    copier, streams = fake_copier(CacheForm().build(4), staging_bytes=1)
    valid, invalid = job_of(copier.layout, rows), job_of(copier.layout, [4])
    streams.log.clear()

    with pytest.raises(ValueError, match="job 1: row 4"):
        await copier.gather([valid, invalid])
    copier.close()

    assert sum(what == "gather" for what, _ in streams.log) == len(rows) * copier.layout.num_planes
    assert all_free(copier)


async def test_jobs_without_rows_are_checked():
    copier, _ = fake_copier(CacheForm().build(4))
    job = job_of(copier.layout, [0])

    with pytest.raises(ValueError, match="job 1: 0 rows need"):
        await copier.gather([job, CopyJob(np.array([], np.int64), np.zeros(1, np.uint8))])
    copier.close()


async def test_a_read_only_payload_can_be_scattered():
    cache = CacheForm().build(4)
    copier, _ = fake_copier(cache)
    payload = bytes(copier.layout.payload_bytes(1))

    await copier.scatter([CopyJob(np.array([2]), memoryview(payload))])
    copier.close()

    assert not any(tensor[2].view(torch.uint8).any() for tensor in cache.tensors)


def test_without_triton_torch_moves_the_rows(monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "lmcache_async.device.kernels", None)

    mover = open_mover(CacheForm().build(4).layout)

    assert isinstance(mover, TorchMover)
    assert "torch's index operations" in caplog.text


# Lanes


GATE = threading.Event()
GATE.set()


@pytest.fixture
def lane():
    lane = Lane("lane", ["a"])
    yield lane
    lane.close()


async def waiter(lane):
    task = asyncio.ensure_future(lane.acquire())
    await turns(1)
    return task


async def test_parts_are_given_to_waiters_in_order(lane):
    held = await lane.acquire()
    waiters = [await waiter(lane), await waiter(lane)]
    assert (lane.statistics().free, lane.statistics().waiting) == (0, 2)

    lane.release(held)
    waiters.append(await waiter(lane))
    for task in waiters:
        assert not any(later.done() for later in waiters[waiters.index(task) + 1 :])
        lane.release(await task)

    assert lane.statistics() == LaneStatistics(parts=1, free=1, waiting=0, waited=3)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_waiter_takes_no_part_also_if_one_was_granted(lane, granted):
    held = await lane.acquire()
    waiting = await waiter(lane)
    if granted:
        lane.release(held)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not granted:
        lane.release(held)

    assert (lane.statistics().free, lane.statistics().waiting) == (1, 0)


async def test_close_waits_for_every_event_and_then_refuses():
    lane = Lane("lane", ["a", "b", "c"])
    events = [FakeEvent(GATE) for _ in range(3)]
    futures = [lane.watch(await lane.acquire(), event) for event in events]

    lane.close()
    lane.close()

    assert all(event.noticed for event in events)
    await asyncio.gather(*futures)
    with pytest.raises(EngineClosedError):
        lane.watch("a", FakeEvent(GATE))


async def test_a_second_close_waits_for_the_events_if_the_first_one_was_interrupted(monkeypatch):
    """Afterwards the caller frees memory that the device may still use."""
    lane, gate = Lane("lane", ["a"]), threading.Event()
    event = FakeEvent(gate)
    lane.watch(await lane.acquire(), event)
    wait, waits = threading.Thread.join, []

    def join(thread):
        waits.append(thread)
        if len(waits) == 1:
            raise KeyboardInterrupt
        gate.set()
        wait(thread)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        lane.close()
    lane.close()

    assert event.noticed


@pytest.mark.parametrize(
    "prepare", [contextlib.nullcontext, lambda: 1 // 0], ids=["prepared", "not prepared"]
)
def test_events_are_awaited_also_after_a_closed_loop_and_a_failed_preparation(prepare):
    lane, gate = Lane("lane", ["a", "b"], prepare), threading.Event()
    events = [FakeEvent(gate), FakeEvent(GATE)]

    async def watch():
        for event in events:
            lane.watch(await lane.acquire(), event)

    asyncio.run(watch())
    gate.set()
    lane.close()

    assert [event.noticed for event in events] == [True, True]
