"""Paged copies out of a GPU and into it, beside pinned copies of the same bytes in one piece.

Caches as of Llama 8B, Llama 70B and DeepSeek's MLA, in blocks of 16 tokens without an order, in every layout that vLLM
gives them, in bfloat16 and in fp8. The limits are `cudaMemcpyAsync` between memory in one piece on the device and the
same pinned host memory, in as many pieces as the copier makes and in one. After that the same copies beside matrix
products on the default stream, with side streams of low and of high priority.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import Case, count, option
from lmcache_async.bench.gpu_caches import MODELS, Shape, refusal, shapes
from lmcache_async.bench.gpu_copies import IN, OUT, Copies, rate
from lmcache_async.bench.gpu_device import CudaGpu
from lmcache_async.bench.gpu_load import load_cases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from lmcache_async.bench.frame import Frame, Probe, Row
    from lmcache_async.bench.gpu_device import Gpu, HostBytes

UNIT = "GB/s"
WANTED_RATIO = 0.95
PRIORITIES = (0, -1)
_HOST_SHARE = 0.75  # of what is free, where nothing is said


def _models(text: str) -> str:
    """Names of models, checked."""
    unknown = [name for name in text.split(",") if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no model {unknown[0]!r}; there are: {', '.join(MODELS)}")
    return text


def _gib(text: str) -> int:
    return 0 if text == "0" else count(text)


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    models: str = option(",".join(MODELS), "models, by name and with commas", parse=_models)
    host_gib: int = option(
        0, "GiB of host memory to pin at most; 0 for three quarters of what is free", parse=_gib
    )
    products: int = option(100, "matrix products asked for at one time, as the load beside copies")
    product_size: int = option(8192, "rows and columns of their matrices")
    chunks: tuple[int, ...] = field(default=(1, 8, 64))
    load_chunks: int = field(default=8)
    layers: int = field(default=0)  # 0: each model's own


QUICK = Settings(products=2, product_size=256, chunks=(1, 2), load_chunks=2, layers=2)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    async for row in measure(settings, frame, CudaGpu()):
        yield row


async def measure(settings: Settings, frame: Frame, gpu: Gpu) -> AsyncIterator[Row]:
    """All rows of this GPU; what does not fit it is left out."""
    chosen = fitting(settings, frame, gpu)
    if not chosen:
        return
    loaded, counts = chosen[0]
    load_chunks = min(settings.load_chunks, counts[-1])
    largest = max(shape.chunk_bytes * sizes[-1] for shape, sizes in chosen)
    with gpu.pin(largest) as host:
        for shape, sizes in chosen:
            for row in await _copy_rows(frame, gpu, shape, sizes, host):
                yield row
        for priority in PRIORITIES:
            for row in await _load_rows(settings, frame, gpu, loaded, load_chunks, host, priority):
                yield row


def fitting(settings: Settings, frame: Frame, gpu: Gpu) -> list[tuple[Shape, list[int]]]:
    """The caches, and numbers of chunks of each in growing order, that fit both memories."""
    device_bytes = gpu.free_bytes()
    host_bytes = settings.host_gib << 30 or int(gpu.host_bytes() * _HOST_SHARE)
    chosen = []
    for shape in shapes(settings.models.split(","), layers=settings.layers):
        fits = []
        for chunks in sorted(settings.chunks):
            why = refusal(shape.chunk_bytes * chunks, device_bytes=device_bytes, host_bytes=host_bytes)
            if why:
                frame.leave_out(f"{shape.name}, {_chunks(chunks)}", why)
            else:
                fits.append(chunks)
        if fits:
            chosen.append((shape, fits))
    return chosen


async def _copy_rows(
    frame: Frame, gpu: Gpu, shape: Shape, sizes: Sequence[int], host: HostBytes
) -> list[Row]:
    gpu.trim()
    with Copies.open(gpu, shape, sizes[-1], host) as copies:
        await copies.check()
        return await frame.compare(
            [_case(frame, copies, shape, way, chunks) for way in (OUT, IN) for chunks in sizes]
        )


def _case(frame: Frame, copies: Copies, shape: Shape, way: str, chunks: int) -> Case:
    nbytes = copies.nbytes(chunks)

    def mean(probe: Probe) -> Probe:
        async def means() -> float:
            return await frame.mean(probe)

        return means

    return Case(
        f"{shape.name}: {way}, {_chunks(chunks)}",
        UNIT,
        mean(rate(copies.paged(way, chunks), nbytes)),
        {
            "memcpy, same pieces": mean(rate(copies.plain(way, copies.pieces(chunks)), nbytes)),
            "memcpy, one piece": mean(rate(copies.plain(way, [nbytes]), nbytes)),
        },
        {**copies.parameters(chunks), "wanted": WANTED_RATIO},
    )


async def _load_rows(
    settings: Settings, frame: Frame, gpu: Gpu, shape: Shape, chunks: int, host: HostBytes, priority: int
) -> list[Row]:
    gpu.trim()
    with Copies.open(gpu, shape, chunks, host, priority=priority) as copies:
        products = gpu.products(settings.product_size)
        return await frame.compare(load_cases(copies, products, settings.products, chunks, priority))


def _chunks(count: int) -> str:
    return f"{count} chunk" + "s" * (count > 1)
