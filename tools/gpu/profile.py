"""Profile of the copy path: for every layout and block size its rate, calls of CUDA, host time, and effect on compute.

The limit of each rate is one contiguous pinned copy of the same bytes. The calls are counted after all measurements
by torch's profiler, which slows down everything after it. `page.targets` has the wanted figures.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmcache_async.bench.measure import Case, Frame, Row
from tools.benchmarks.gpu import IN, OUT, Copies, Shape, load_cases, rate, refusal, shapes
from tools.benchmarks.gpu_device import Gpu, HostBytes, Products

WAITS = {
    "waits for events": ("cudaEventSynchronize", "cuEventSynchronize"),
    "waits for streams": ("cudaStreamSynchronize", "cuStreamSynchronize"),
    "waits for the device": ("cudaDeviceSynchronize", "cuCtxSynchronize"),
}
"""Names of CUDA calls that block a thread. The threads of the lanes wait for events; the profiler itself waits for the device."""

KINDS = ("kernels", "copies", *WAITS)

_FENCES = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the profile.

    Attributes:
        chunks: Chunks of a batch.
        layers: Layers of each model; 0 for its own number.
        products: Matrix products of one measurement of the compute load.
    """

    models: tuple[str, ...] = ("llama-8b", "deepseek-mla")
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    chunks: int = 128
    layers: int = 0
    products: int = 40
    product_size: int = 8192


QUICK = Settings(
    models=("deepseek-mla",), block_sizes=(16, 64), chunks=1, layers=1, products=2, product_size=64
)


async def profile(
    settings: Settings, frame: Frame, gpu: Gpu, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield a figure set for each layout, block size and direction; the calls of CUDA of all in a last pass.

    Args:
        settings: Sizes of the profile.
        frame: Options of the measurement; receives what is left out.
        gpu: The device.
        seconds: Time after which the rest is left out.
    """
    deadline = time.monotonic() + seconds
    chosen = []
    device_bytes, host_bytes = gpu.free_bytes(), gpu.host_bytes()
    for shape in _shapes(settings):
        nbytes = shape.chunk_bytes * settings.chunks
        if why := refusal(nbytes, device_bytes=device_bytes, host_bytes=host_bytes):
            frame.leave_out(_name(shape), why)
        else:
            chosen.append(shape)
    if not chosen:
        return
    with gpu.pin(max(shape.chunk_bytes for shape in chosen) * settings.chunks) as host:
        # The clocks of an idle GPU need a second to rise.
        gpu.products(settings.product_size).ask(15 * settings.products).milliseconds()
        measured = []
        for shape in chosen:
            if time.monotonic() > deadline:
                frame.leave_out(_name(shape), "the time limit was reached")
                continue
            for row in await _measure(settings, frame, gpu, shape, host):
                yield row
            measured.append(shape)
        for shape in measured:
            if time.monotonic() > deadline:
                frame.leave_out(f"{_name(shape)}: calls of CUDA", "the time limit was reached")
                continue
            for row in await _count(settings, gpu, shape, host):
                yield row


def _shapes(settings: Settings) -> list[Shape]:
    return [
        replace(shape, block_size=block_size)
        for shape in shapes(settings.models, layers=settings.layers)
        if shape.dtype in settings.dtypes
        for block_size in settings.block_sizes
    ]


def _name(shape: Shape) -> str:
    return f"{shape.name}, blocks of {shape.block_size}"


async def _measure(
    settings: Settings, frame: Frame, gpu: Gpu, shape: Shape, host: HostBytes
) -> list[dict[str, Any]]:
    chunks = settings.chunks
    gpu.trim()
    with Copies.open(gpu, shape, chunks, host) as copies:
        await copies.check()
        nbytes = copies.nbytes(chunks)
        limit = "one contiguous copy"
        cases = [
            Case(
                way,
                "GB/s",
                rate(copies.paged(way, chunks), nbytes),
                {limit: rate(copies.plain(way, [nbytes]), nbytes)},
            )
            for way in (OUT, IN)
        ]
        rates = {row.name: row for row in await frame.compare(cases)}
        products = gpu.products(settings.product_size)
        beside = load_cases(copies, products, settings.products, chunks, priority=0)
        loads = await frame.compare([case for case in beside if case.name.startswith("product beside")])
        slow = {way: _ratio(loads, f"product beside {way}", "product alone") for way in (OUT, IN)}
        plain = {way: _ratio(loads, f"product beside {way}", "product beside memcpy") for way in (OUT, IN)}
        rows = []
        for way in (OUT, IN):
            fence_us = _fence_us(copies, products, settings.products)
            loop_ms = await _loop_ms(copies, way, chunks)
            rows.append(
                {
                    "cache": _name(shape),
                    "way": way,
                    "bytes": nbytes,
                    "row_bytes": copies.parameters(chunks)["row_bytes"],
                    "mover": copies.parameters(chunks)["mover"],
                    "gb_per_s": rates[way].value,
                    "limit_gb_per_s": rates[way].limit_value,
                    "ratio": rates[way].ratio,
                    "model_thread_us": fence_us,
                    "loop_thread_ms": loop_ms,
                    "compute_slowdown": slow[way],
                    "compute_slowdown_to_plain_copy": plain[way],
                }
            )
        return rows


def _ratio(rows: Sequence[Row], name: str, limit: str) -> float:
    return next(float(row.ratio) for row in rows if row.name.startswith(name) and row.limit_name == limit)


def _fence_us(copies: Copies, products: Products, count: int) -> float:
    """Return the microseconds of a fence on the model's thread, whose stream is busy. A wait would take as long as it."""
    running = products.ask(count)
    start = time.perf_counter()
    for _ in range(_FENCES):
        copies.copier.fence()
    taken = time.perf_counter() - start
    running.milliseconds()  # the device is idle before the next measurement
    return taken / _FENCES * 1e6


async def _loop_ms(copies: Copies, way: str, chunks: int) -> float:
    """Return the CPU milliseconds of a copy on the thread of the loop."""
    copy = copies.paged(way, chunks)
    start = time.thread_time()
    await copy()
    return (time.thread_time() - start) * 1e3


async def _count(settings: Settings, gpu: Gpu, shape: Shape, host: HostBytes) -> list[dict[str, Any]]:
    """Return the calls of CUDA of one copy in each direction, with its number of parts and pieces."""
    chunks = settings.chunks
    rows = []
    gpu.trim()
    with Copies.open(gpu, shape, chunks, host) as copies:
        for way in (OUT, IN):
            copy = copies.paged(way, chunks)
            await copy()
            calls: dict[str, int | None] = dict.fromkeys(KINDS)
            if gpu.device.type == "cuda":
                kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                # Without acc_events some versions of torch warn.
                with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
                    await copy()
                events = profiler.events() or ()
                calls |= count_calls((event.name, event.device_type.name == "CUDA") for event in events)
            pieces = len(copies.pieces(chunks))
            rows.append({"cache": _name(shape), "way": way, "pieces": pieces, "calls": calls})
    return rows


def count_calls(events: Iterable[tuple[str, bool]]) -> dict[str, int]:
    """Count profiled events by kind.

    Args:
        events: The name of each event, and whether it ran on the device.
    """
    counts = Counter[str]()
    for name, on_device in events:
        if on_device:
            counts["copies" if name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
        else:
            counts.update(kind for kind, names in WAITS.items() if name in names)
    return {kind: counts[kind] for kind in KINDS}
