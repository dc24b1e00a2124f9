"""Run by test_copier_kernels.py in a process of its own: Triton's interpreter is chosen when it is imported."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import numpy as np
import torch

from lmcache_async.device.copier import CopyJob
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.device.cuda import open_cuda_copiers
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.movers import TritonMover, open_mover
from lmcache_async.testing.caches import VLLM_ORDERS, CacheForm
from tests.support.fake_streams import FakeStreams

FORMS = [
    *(CacheForm(order=order) for order in VLLM_ORDERS),
    *(CacheForm(order=order, granularity="token") for order in ("2BNHD", "B2NHD", "BHNC")),
    CacheForm(order="BND", granularity="token", content=7, dtype=torch.int8),
    CacheForm(heads=3, content=7, dtype=torch.float8_e4m3fn, padding=5),
    CacheForm(content=12, dtype=torch.float32, separate=True),
    CacheForm(heads=1, tokens=4, content=3, dtype=torch.float16),
    CacheForm(tokens=64, content=520, layers=1, dtype=torch.int8),  # longer than one program's block
]


def job_of(layout: KVLayout, rows: list[int]) -> CopyJob:
    return CopyJob(np.array(rows, np.int64), np.full(layout.payload_bytes(len(rows)), 0xA5, np.uint8))


async def compare(form: CacheForm) -> None:
    """Kernel against CPU copier: the same payloads, the same cache afterwards, to the last byte."""
    source, target, expected = form.build(5), form.build(5, seed=1), form.build(5, seed=1)
    mover = open_mover(source.layout)
    assert isinstance(mover, TritonMover)
    (gathering,) = open_cuda_copiers([source.layout], staging_bytes=1, streams=FakeStreams(), movers=[mover])
    (scattering,) = open_cuda_copiers([target.layout], streams=FakeStreams())
    reference, check = CpuCopier(source.layout), CpuCopier(expected.layout)
    rows = [[3, -1, 4, 0], [2, 1]]
    jobs, wanted = ([job_of(source.layout, some) for some in rows] for _ in range(2))

    await gathering.gather(jobs)
    await reference.gather(wanted)
    for job, want in zip(jobs, wanted, strict=True):
        assert np.array_equal(job.payload, want.payload), form
    moved = [
        CopyJob(np.array(some), job.payload) for some, job in zip([[0, 2, -1, 3], [4, -1]], jobs, strict=True)
    ]
    await scattering.scatter(moved)
    await check.scatter(moved)
    assert all(map(torch.equal, target.storages, expected.storages)), form
    for copier in (gathering, scattering, reference, check):
        copier.close()


async def compare_rows_of_two_sizes() -> None:
    """Layers of different content: rows' places in staging come from the table."""
    wide, narrow = torch.randn(4, 2, 4, 16), torch.randn(4, 1, 4, 6).half()
    layout = KVLayout.from_block_views([wide, narrow], num_blocks=4, block_size=4)
    mover = TritonMover(layout)
    assert mover.columns == 3
    (copier,) = open_cuda_copiers([layout], staging_bytes=1, streams=FakeStreams(), movers=[mover])
    job = job_of(layout, [2, 0, 3])

    await copier.gather([job])
    assert job.payload.tobytes() == wide[[2, 0, 3]].numpy().tobytes() + narrow[[2, 0, 3]].numpy().tobytes()
    await copier.scatter([CopyJob(np.array([1, -1, 2]), job.payload)])
    assert torch.equal(wide[1:3], wide[[1, 3]])
    assert torch.equal(narrow[1:3], narrow[[1, 3]])
    assert job.payload[: wide[0].nbytes].tobytes() == wide[1].numpy().tobytes()
    copier.close()


async def main() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    for form in FORMS:
        await compare(form)
        await compare(replace(form, layers=1, heads=1))
    await compare_rows_of_two_sizes()


if __name__ == "__main__":
    asyncio.run(main())
