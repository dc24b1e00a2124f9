"""Profile of the copy path: for every layout and block size its rate, calls of CUDA, host time, and effect on compute.

The limit of each rate is one contiguous pinned copy of the same bytes. The calls are counted after all measurements
by torch's profiler, which slows down everything after it. `page.targets` has the wanted figures.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lmcache_async.bench.measure import Case, Frame
from tools.benchmarks.gpu import IN, OUT, Copies, Shape, products_beside, rate, refusal, shapes
from tools.benchmarks.gpu_device import Gpu, HostBytes, Products

WAITS = {
    "waits for events": ("cudaEventSynchronize", "cuEventSynchronize"),
    "waits for streams": ("cudaStreamSynchronize", "cuStreamSynchronize"),
    "waits for the device": ("cudaDeviceSynchronize", "cuCtxSynchronize"),
}
"""Names of CUDA calls that block a thread. The threads of the lanes wait for events; the profiler itself waits for the device."""

COPY = "lmcache-async copy"
"""Name of the profiled span of a copy, from the call to its end on the event loop."""

KINDS = ("kernels", "copies", *WAITS)

_FENCES = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the profile.

    Attributes:
        chunks: Chunks of a batch.
        layers: Layers of each model; 0 for its own number.
        products: Matrix products of one measurement of the compute load.
        beside_block_size: The block size with which compute beside copies is measured.
        beside_chunks: Chunks of a batch beside compute, so that several batches are copied during the products.
    """

    models: tuple[str, ...] = ("llama-8b", "deepseek-mla")
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    chunks: int = 128
    layers: int = 0
    products: int = 80
    product_size: int = 8192
    beside_block_size: int = 16
    beside_chunks: int = 32


QUICK = Settings(
    models=("deepseek-mla",),
    block_sizes=(16, 64),
    chunks=1,
    layers=1,
    products=2,
    product_size=64,
    beside_chunks=1,
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
        gpu.products(settings.product_size).ask(4 * settings.products).milliseconds()
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
        rows = []
        for way in (OUT, IN):
            fence_us = _fence_us(copies, products, settings.products)
            loop_ms = await _loop_ms(copies, way, chunks)
            beside = {}
            if shape.block_size == settings.beside_block_size:
                beside = await _beside(settings, copies, way, frame.rounds)
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
                    **beside,
                }
            )
        return rows


async def _beside(settings: Settings, copies: Copies, way: str, rounds: int) -> dict[str, float]:
    """Measure products alone, beside the copier's copies, and beside plain copies of the same pieces.

    Returns:
        Medians over the rounds: the ratios of the times and of the cycles of a product to those of one alone in the
        same round, and the rate of the copies beside the products in GB/s. The products are of constant matrices; the names
        with `_at_power_limit` are of random ones.
    """
    chunks, found = settings.beside_chunks, dict[str, list[float]]()
    paged = copies.paged(way, chunks, fenced=False)
    plain = copies.plain(way, copies.pieces(chunks))
    nbytes = copies.nbytes(chunks)
    for constant, suffix in ((True, ""), (False, "_at_power_limit")):
        products = copies.gpu.products(settings.product_size, constant=constant)
        for _ in range(rounds):
            alone = await products_beside(products, settings.products)
            for copy, by in ((paged, ""), (plain, "_by_plain_copy")):
                beside = await products_beside(products, settings.products, copy, nbytes)
                figures = {
                    "compute_slowdown": beside.milliseconds / alone.milliseconds,
                    "beside_gb_per_s": beside.gb_per_s,
                }
                if alone.cycles:
                    figures["compute_cycles"] = beside.cycles / alone.cycles
                for name, value in figures.items():
                    found.setdefault(f"{name}{by}{suffix}", []).append(value)
    return {name: statistics.median(taken) for name, taken in found.items()}


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
            idle: dict[str, float] = {}
            if gpu.device.type == "cuda":
                kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                # Without acc_events some versions of torch warn.
                with (
                    torch.profiler.profile(activities=kinds, acc_events=True) as profiler,
                    torch.profiler.record_function(COPY),
                ):
                    await copy()
                events = [
                    Event(
                        event.name,
                        event.device_type.name == "CUDA",
                        event.time_range.start,
                        event.time_range.end,
                    )
                    for event in profiler.events() or ()
                ]
                calls |= count_calls((event.name, event.on_device) for event in events)
                idle = idle_bus(events, way)
            pieces = len(copies.pieces(chunks))
            rows.append(
                {"cache": _name(shape), "way": way, "pieces": pieces, "calls": calls, "bus_idle_us": idle}
            )
    return rows


class Event(NamedTuple):
    """Profiled event; times in microseconds."""

    name: str
    on_device: bool
    start: float
    end: float


def idle_bus(events: Sequence[Event], way: str) -> dict[str, float]:
    """Return the microseconds of a copy in which nothing crosses the bus: before, between and after its transfers.

    The profiler slows down the host, so that all are upper limits.
    """
    transfer = "Memcpy DtoH" if way == OUT else "Memcpy HtoD"
    whole = next((event for event in events if event.name == COPY and not event.on_device), None)
    spans = sorted(
        (event.start, event.end) for event in events if event.on_device and event.name.startswith(transfer)
    )
    if whole is None or not spans:
        return {}
    end, between = spans[0][0], 0.0
    for start, stop in spans:
        between += max(0.0, start - end)
        end = max(end, stop)
    return {"before": spans[0][0] - whole.start, "between": between, "after": whole.end - end}


def count_calls(events: Iterable[tuple[str, bool]]) -> dict[str, int]:
    """Count profiled events by kind.

    Args:
        events: The name of each event, and whether it ran on the device.
    """
    counts = Counter[str]()
    for name, on_device in events:
        if name == COPY:
            continue  # on the device too, once for each stream
        if on_device:
            counts["copies" if name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
        else:
            counts.update(kind for kind, names in WAITS.items() if name in names)
    return {kind: counts[kind] for kind in KINDS}
