"""The GPU copier on a GPU: every layout, and its ordering relative to the model's streams."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_async.device import open_copiers
from lmcache_async.device.copier import CopyJob
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.device.cuda import CudaCopier, open_cuda_copiers
from lmcache_async.device.movers import TorchMover, TritonMover
from lmcache_async.testing.caches import SLOT_ORDERS, VLLM_ORDERS, CacheForm, cache_forms
from tests.support.caches import check_copier, check_rows_of_two_sizes, job_of

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 400_000_000
"""A kernel of about 200 ms, far longer than the host takes to enqueue everything after it."""

FORMS = [CacheForm(order=order) for order in VLLM_ORDERS]
FORMS += [CacheForm(order=order, granularity="token") for order in SLOT_ORDERS]
FORMS += [CacheForm(heads=3, content=7, dtype=torch.float8_e4m3fn, padding=5)]
FORMS += [CacheForm(tokens=16, heads=8, content=256, layers=8)]


def pinned(nbytes):
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8).pin_memory().numpy()


def pinned_job(layout, rows):
    return job_of(layout, rows, pinned)


def open_copier(layout, *, mover=TritonMover, staging_bytes=1 << 20):
    (copier,) = open_cuda_copiers([layout], staging_bytes=staging_bytes, movers=[mover(layout)])
    return copier


@contextmanager
def copier_of(cache, **options):
    copier = open_copier(cache.layout, **options)
    try:
        yield copier
    finally:
        copier.close()


@pytest.mark.parametrize("mover", [TritonMover, TorchMover])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.order}-{form.granularity}-{form.dtype}")
async def test_every_layout_is_copied_as_by_the_cpu_copier(form, mover):
    await check_copier(form, partial(open_copier, mover=mover), device="cuda", payload=pinned)


@settings(max_examples=25)
@given(cache_forms(), st.sampled_from([TritonMover, TorchMover]), st.integers(1, 1 << 14))
def test_any_form_through_a_ring_of_any_size(form, mover, staging_bytes):
    opened = partial(open_copier, mover=mover, staging_bytes=staging_bytes)
    asyncio.run(check_copier(form, opened, device="cuda", payload=pinned))


@pytest.mark.parametrize("mover", [TritonMover, TorchMover])
async def test_rows_of_two_sizes_are_copied(mover):
    await check_rows_of_two_sizes(partial(open_copier, mover=mover), device="cuda", payload=pinned)


async def test_the_ring_wraps_around_many_times():
    form = CacheForm(tokens=16, heads=8, content=256, layers=4)
    cache = form.build(64, device="cuda")
    origin = form.build(64)
    reference = CpuCopier(origin.layout)
    rows = [list(range(start, start + 16)) for start in range(0, 64, 16)]
    jobs, wanted = ([pinned_job(cache.layout, some) for some in rows] for _ in range(2))

    with copier_of(cache, staging_bytes=512 << 10) as copier:
        await asyncio.gather(*(copier.gather([job]) for job in jobs))
        waited = copier.statistics()[0].waited
        for storage in cache.storages:
            storage.zero_()
        await asyncio.gather(*(copier.scatter([job], copier.fence()) for job in jobs))
    await reference.gather(wanted)
    reference.close()

    assert waited > 0
    assert all(np.array_equal(job.payload, want.payload) for job, want in zip(jobs, wanted, strict=True))
    assert all(map(torch.equal, (storage.cpu() for storage in cache.storages), origin.storages))


async def test_a_store_behind_a_long_kernel_reads_the_final_values():
    cache = CacheForm(dtype=torch.float32).build(6, device="cuda")
    job = pinned_job(cache.layout, [4, 2])
    with copier_of(cache) as copier:
        cache.tensors[0].fill_(0.0)  # the first use of a kernel loads it, which may wait for a running one
        torch.cuda.synchronize()

        torch.cuda._sleep(SPIN_CYCLES)
        for tensor in cache.tensors:
            tensor.fill_(7.0)
        written = torch.cuda.Event()
        written.record()
        fence = copier.fence()
        assert not written.query()  # taking a fence did not block
        await copier.gather([job], fence)

    assert (job.payload.view(np.float32) == 7.0).all()


async def test_fences_do_not_block_whatever_their_number():
    with copier_of(CacheForm().build(6, device="cuda")) as copier:
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)
        ended = torch.cuda.Event()
        ended.record()
        fences = [copier.fence() for _ in range(200)]

        assert not ended.query()
        await copier.wait_fence(fences[-1])


async def test_a_load_waits_for_its_fence_and_is_seen_by_the_model_afterwards():
    cache = CacheForm(dtype=torch.float32).build(6, device="cuda")
    job = pinned_job(cache.layout, [4, 2])
    job.payload.view(np.float32)[:] = 3.0
    with copier_of(cache) as copier:
        torch.cuda.synchronize()

        torch.cuda._sleep(SPIN_CYCLES)
        for tensor in cache.tensors:
            tensor.zero_()  # as vLLM zeroes new blocks; an earlier load would be lost
        await copier.scatter([job], copier.fence())
        # On the model's stream, without synchronisation.
        sums = [tensor.sum(dim=(1, 2, 3)) for tensor in cache.tensors]

    row = float(3 * cache.tensors[0][0].numel())
    assert all(total.tolist() == [0, 0, row, 0, row, 0] for total in sums)


async def test_a_load_does_not_wait_for_a_store_behind_a_long_kernel():
    cache = CacheForm(dtype=torch.float32).build(6, device="cuda")
    store, load = pinned_job(cache.layout, [0, 1]), pinned_job(cache.layout, [4, 5])
    with copier_of(cache) as copier:
        await copier.gather([store])
        await copier.scatter([load])
        model = torch.cuda.Stream()
        with torch.cuda.stream(model):
            torch.cuda._sleep(SPIN_CYCLES)
            fence = copier.fence()
            storing = asyncio.ensure_future(copier.gather([store], fence))
            await asyncio.sleep(0)
        await copier.scatter([load])

        assert not storing.done()
        await storing


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "stream of its own"])
async def test_copies_end_while_the_model_computes(own_stream):
    """Stores of a step, and loads, end during the later steps that the model has already submitted."""
    cache = CacheForm(tokens=16, heads=8, content=256, layers=4).build(64, device="cuda")
    jobs = [pinned_job(cache.layout, list(range(start, start + 16))) for start in range(0, 64, 16)]
    matrix, product = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    with copier_of(cache, staging_bytes=512 << 10) as copier, torch.cuda.stream(stream):
        await copier.gather(jobs, copier.fence())
        torch.cuda.synchronize()

        for _ in range(20):
            torch.mm(matrix, matrix, out=product)
        fence = copier.fence()
        for _ in range(300):
            torch.mm(matrix, matrix, out=product)
        ended = torch.cuda.Event()
        ended.record()
        await copier.gather(jobs, fence)
        await copier.scatter(jobs, fence)

        assert not ended.query()
        torch.cuda.synchronize()


async def test_copies_run_while_another_thread_captures_a_cuda_graph():
    cache = CacheForm(tokens=16, heads=8, content=256, layers=4).build(64, device="cuda")
    jobs = [pinned_job(cache.layout, list(range(start, start + 16))) for start in range(0, 64, 16)]
    counter, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    began, copied = threading.Event(), threading.Event()

    def capture():
        with torch.cuda.graph(graph):
            counter.add_(1)
            began.set()
            assert copied.wait(20)
            counter.add_(1)

    with copier_of(cache, staging_bytes=512 << 10) as copier:
        await copier.gather(jobs)
        await copier.scatter(jobs)
        capturing = asyncio.ensure_future(asyncio.to_thread(capture))
        await asyncio.to_thread(began.wait, 20)

        await copier.gather(jobs)
        await copier.scatter(jobs)
        copied.set()
        await capturing
    graph.replay()

    assert counter.item() == 2


async def test_the_loop_runs_on_while_a_store_waits_for_the_model():
    cache = CacheForm().build(6, device="cuda")
    with copier_of(cache) as copier:
        await copier.gather([pinned_job(cache.layout, [0])])
        torch.cuda._sleep(SPIN_CYCLES)
        storing = asyncio.ensure_future(copier.gather([pinned_job(cache.layout, [1])], copier.fence()))
        turns = 0
        while not storing.done() and turns < 100:
            await asyncio.sleep(0)
            turns += 1

        assert turns == 100
        await storing


async def test_a_store_cancelled_behind_a_long_kernel_copies_nothing():
    cache = CacheForm(dtype=torch.float32).build(6, device="cuda")
    job = pinned_job(cache.layout, [0, 1])
    with copier_of(cache) as copier:
        await copier.gather([job])
        torch.cuda._sleep(SPIN_CYCLES)
        for tensor in cache.tensors:
            tensor.fill_(7.0)
        storing = asyncio.ensure_future(copier.gather([job], copier.fence()))
        await asyncio.sleep(0)
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        before = job.payload.copy()
        torch.cuda.synchronize()

        assert np.array_equal(job.payload, before)
        assert copier.statistics()[0].free == copier.statistics()[0].parts


async def test_pageable_payloads_are_copied_all_the_same():
    cache = CacheForm().build(6, device="cuda")
    rows = np.array([5, 0], np.int64)
    payload = np.zeros(cache.layout.payload_bytes(2), np.uint8)
    (copier,) = open_copiers([cache.layout])

    await copier.gather([CopyJob(rows, payload)], copier.fence())
    await copier.scatter([CopyJob(np.array([1, 2]), memoryview(payload.tobytes()))])
    copier.close()

    assert all(
        torch.equal(tensor[[1, 2]], tensor[[5, 0]]) for tensor in (t.view(torch.int16) for t in cache.tensors)
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="only one GPU")
async def test_caches_on_two_gpus_are_copied_whatever_the_current_one():
    def opened(layout):
        (copier,) = open_copiers([layout])
        assert isinstance(copier.mover, TritonMover)
        return copier

    for current, device in itertools.product(range(2), repeat=2):
        with torch.cuda.device(current):
            await check_copier(CacheForm(), opened, device=f"cuda:{device}", payload=pinned)
            assert torch.cuda.current_device() == current


def test_the_kernel_is_used_on_a_gpu():
    (copier,) = open_copiers([CacheForm().build(4, device="cuda").layout])

    assert isinstance(copier, CudaCopier)
    assert isinstance(copier.mover, TritonMover)
    copier.close()
