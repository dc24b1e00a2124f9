"""Run by test_copier_kernels.py in a separate process, because Triton's interpreter is selected at import."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import torch

from lmcache_async.device.cuda import CudaCopier, open_cuda_copiers
from lmcache_async.device.layout import KVLayout
from lmcache_async.device.movers import TritonMover, open_mover
from lmcache_async.testing.caches import VLLM_ORDERS, CacheForm
from tests.support.caches import check_copier, check_rows_of_two_sizes
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


def open_copier(layout: KVLayout) -> CudaCopier:
    mover = open_mover(layout)
    assert isinstance(mover, TritonMover)
    (copier,) = open_cuda_copiers([layout], staging_bytes=1, streams=FakeStreams(), movers=[mover])
    return copier


async def main() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    for form in FORMS:
        await check_copier(form, open_copier)
        await check_copier(replace(form, layers=1, heads=1), open_copier)
    await check_rows_of_two_sizes(open_copier)


if __name__ == "__main__":
    asyncio.run(main())
