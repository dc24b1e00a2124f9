"""The copier of a cache in host memory, and the rules that every copier keeps."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.device import cpu
from lmcache_async.device.copier import CopyJob, open_copier, wait_all
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.errors import EngineClosedError
from lmcache_async.testing.caches import CacheForm, cache_forms


def copy_jobs(layout, *rows):
    return [
        CopyJob(np.array(some, np.int64), np.full(layout.payload_bytes(len(some)), 0xA5, np.uint8))
        for some in rows
    ]


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
    expected.assign(target_rows, source, rows)
    before = source.snapshot()
    edges = sorted(data.draw(st.lists(st.integers(0, count), max_size=2)))
    parts = list(zip([0, *edges], [*edges, count], strict=True))

    with pytest.MonkeyPatch.context() as patch:
        # Small enough for these caches to take every way of copying, and several threads.
        patch.setattr(cpu, "MIN_THREAD_BYTES", 1)
        patch.setattr(cpu, "LARGE_ROW_BYTES", data.draw(st.sampled_from((1, 64, 1 << 20))))
        patch.setattr(cpu, "LONG_RUN_BYTES", data.draw(st.sampled_from((1, 1 << 20))))
        patch.setattr(cpu, "BOUNCE_BYTES", data.draw(st.sampled_from((1, 1 << 20))))
        patch.setattr(cpu, "MIN_ITEM_BYTES", data.draw(st.sampled_from((1, 64, 1 << 20))))
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


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=700),
    st.sampled_from([3, 4096, 8192, 12288, 32768, 262144, 524288]),
)
def test_divided_items_are_the_same_bytes_and_enough_to_free_the_lock(rows, size):
    where, item = cpu.divide(np.array(rows, np.int64), size)

    first_bytes = np.array(rows).repeat(size // item) * size + np.tile(np.arange(0, size, item), len(rows))
    assert np.array_equal(where * item, first_bytes)
    assert len(where) >= 512 or item < 2 * cpu.MIN_ITEM_BYTES or item % 2


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
    copier = open_copier(cache.layout)
    (job,) = copy_jobs(cache.layout, [4, 1])

    await copier.gather([job])
    copier.close()

    pages = [tensor[row].transpose(0, 1).contiguous() for tensor in cache.tensors for row in (4, 1)]
    assert job.payload.tobytes() == b"".join(page.view(torch.uint8).numpy().tobytes() for page in pages)


@pytest.mark.parametrize("direction", ["gather", "scatter"])
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
    ],
)
async def test_a_wrong_job_moves_nothing_of_its_batch(direction, rows, payload, message):
    cache = CacheForm(layers=2, dtype=torch.float16).build(6)
    before = cache.snapshot()
    copier = CpuCopier(cache.layout)
    (good,) = copy_jobs(cache.layout, [2, 3])

    with pytest.raises(ValueError, match=message):
        await getattr(copier, direction)([good, CopyJob(rows, payload)])
    copier.close()

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


async def test_an_empty_batch_and_empty_jobs_are_nothing():
    copier = CpuCopier(CacheForm().build(2).layout)

    await copier.gather([])
    await copier.scatter(copy_jobs(copier.layout, [], []))

    copier.close()


async def test_a_closed_copier_refuses():
    copier = CpuCopier(CacheForm().build(2).layout)
    copier.close()
    copier.close()

    with pytest.raises(EngineClosedError):
        await copier.gather(copy_jobs(copier.layout, [0]))


def test_a_cache_in_host_memory_has_no_fence():
    copier = CpuCopier(CacheForm().build(2).layout)

    assert copier.fence() is None
    copier.close()


def test_there_is_no_copier_for_other_devices():
    with pytest.raises(ValueError, match="meta"):
        open_copier(CacheForm().build(2, device="meta").layout)


async def test_cancellation_waits_for_the_copy_that_runs_and_withdraws_the_rest(monkeypatch):
    copier = CpuCopier(CacheForm().build(8).layout, threads=1)
    started, go_on, ended = threading.Event(), threading.Event(), []

    def slow_copy(self, jobs, part, *, to_host):
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


async def test_wait_all_waits_for_every_future_and_raises_the_first_error():
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(3)]
    waiting = asyncio.ensure_future(wait_all(futures))

    futures[1].set_exception(OSError("second"))
    futures[0].set_exception(OSError("first"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    futures[2].set_result(None)

    with pytest.raises(OSError, match="first"):
        await waiting
