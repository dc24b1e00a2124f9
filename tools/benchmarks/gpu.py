"""Paged copies from and to a GPU, compared with contiguous copies of the same bytes.

The caches are those of Llama 8B, Llama 70B and DeepSeek's MLA, in random blocks of 16 tokens, in every layout
that vLLM uses, in bfloat16 and in fp8. The limits are `cudaMemcpyAsync` between contiguous device memory and
the same pinned host memory, in as many pieces as the copier makes, and in one. After that the same copies run
concurrently with matrix products on the default stream, with side streams of low and of high priority.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from lmcache_async.bench.measure import Case, Frame, Parameter, Probe, Row
from lmcache_async.device.copier import CopyJob
from lmcache_async.device.cuda import CudaCopier, open_cuda_copiers
from lmcache_async.device.layout import KVLayout
from lmcache_async.types import BlockIds
from tools.benchmarks.command import count, option
from tools.benchmarks.gpu_device import CudaGpu, Gpu, HostBytes, Products
from tools.benchmarks.repetition import mean_figure

BLOCK_SIZE = 16
CHUNK_TOKENS = 256

STAGING_BYTES = 128 << 20
"""Staging memory of each direction, as by default."""

SPARE_BYTES = 1 << 30
"""Device memory for tables, CUDA itself and the rounding of the allocator."""

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model that determine its KV.

    Attributes:
        latent: The KV is one compressed vector per token (MLA) in place of K and V.
    """

    layers: int
    heads: int
    head_dim: int
    latent: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        return (
            ("fused", "cross-layer blocks")
            if self.latent
            else ("K and V apart", "fused", "cross-layer blocks")
        )


MODELS = {
    "llama-8b": Model(32, 8, 128),
    "llama-70b": Model(80, 8, 128),
    "deepseek-mla": Model(61, 1, 576, latent=True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of one cache to measure.

    Attributes:
        form: `K and V apart`: each layer's K before its V, as in FlashAttention; `fused`: K and V of a token
            are adjacent, or one latent vector; `cross-layer blocks`: a block has all layers.
        block_size: Tokens of a block.
    """

    name: str
    model: Model
    dtype: torch.dtype
    form: str
    block_size: int = BLOCK_SIZE

    @property
    def chunk_blocks(self) -> int:
        return CHUNK_TOKENS // self.block_size

    @property
    def chunk_bytes(self) -> int:
        parts = 1 if self.model.latent else 2
        elements = self.model.layers * self.model.heads * parts * self.model.head_dim
        return elements * self.dtype.itemsize * CHUNK_TOKENS

    def build(self, num_blocks: int, device: torch.device) -> KVLayout:
        """Return a cache of `num_blocks` blocks with random bytes."""
        layout = KVLayout.from_block_views(
            self._views(num_blocks, device), num_blocks=num_blocks, block_size=self.block_size
        )
        for storage in layout.storages:
            storage.random_()
        return layout

    def _views(self, blocks: int, device: torch.device) -> list[torch.Tensor | Sequence[torch.Tensor]]:
        model = self.model

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device)

        tokens = self.block_size
        content = (tokens, model.head_dim) if model.latent else (model.heads, tokens, 2 * model.head_dim)
        if self.form == "cross-layer blocks":
            return list(empty(blocks, model.layers, *content).unbind(1))
        if self.form == "fused":
            return [empty(blocks, *content) for _ in range(model.layers)]
        layers = (empty(2, blocks, tokens, model.heads, model.head_dim) for _ in range(model.layers))
        return [[part.transpose(1, 2) for part in layer.unbind(0)] for layer in layers]


def shapes(models: Sequence[str], *, layers: int = 0) -> list[Shape]:
    """Return every form and dtype of these models, with `layers` layers unless that is 0."""
    made = []
    for name in models:
        model = MODELS[name]
        cut = Model(layers or model.layers, model.heads, model.head_dim, latent=model.latent)
        for dtype, element in DTYPES.items():
            made += [Shape(f"{name}, {dtype}, {form}", cut, element, form) for form in model.forms]
    return made


def refusal(nbytes: int, *, device_bytes: int, host_bytes: int) -> str:
    """Return why a batch of `nbytes` cannot be measured; "" if it can.

    The device holds it twice, in the paged cache and contiguously, and the staging memory of both directions.
    """
    needed = 2 * nbytes + 2 * STAGING_BYTES + SPARE_BYTES
    if needed > device_bytes:
        return f"it needs {_gib(needed)} of device memory, and {_gib(device_bytes)} are free"
    if nbytes > host_bytes:
        return f"it needs {_gib(nbytes)} of pinned host memory, and {_gib(host_bytes)} may be pinned"
    return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


Copy: TypeAlias = "Callable[[], Awaitable[None]]"
"""Makes a copy once and waits for its end."""

OUT, IN = "D2H", "H2D"


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A paged cache, its copier, and contiguous memory of its size on the device and, pinned, on the host.

    Attributes:
        blocks: The cache's blocks in random order; chunk i has the i-th `chunk_blocks` of them.
        chunk_blocks: Blocks of a chunk.
    """

    gpu: Gpu
    layout: KVLayout
    copier: CudaCopier
    blocks: BlockIds
    chunk_blocks: int
    piece: torch.Tensor
    host: HostBytes

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, gpu: Gpu, shape: Shape, chunks: int, host: HostBytes, *, priority: int = 0
    ) -> Iterator[Copies]:
        """Open a cache of `chunks` chunks. `host` has room for them."""
        layout = shape.build(chunks * shape.chunk_blocks, gpu.device)
        blocks = np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int64)
        (copier,) = open_cuda_copiers(
            [layout],
            staging_bytes=STAGING_BYTES,
            store_priority=priority,
            load_priority=priority,
            streams=gpu.streams(),
            movers=[gpu.mover(layout)],
        )
        try:
            size = layout.payload_bytes(layout.num_blocks)
            piece = torch.empty(size, dtype=torch.uint8, device=gpu.device)
            yield cls(gpu, layout, copier, blocks, shape.chunk_blocks, piece, host[:size])
        finally:
            copier.close()

    async def check(self) -> None:
        """Store the whole cache, clear it, and load it again.

        Raises:
            RuntimeError: The content differs, so measurements would be meaningless.
        """
        storages = self.layout.storages
        ends = accumulate(storage.numel() for storage in storages)
        kept = [self.piece[end - len(storage) : end] for storage, end in zip(storages, ends, strict=True)]
        for storage, copy in zip(storages, kept, strict=True):
            copy.copy_(storage)
        chunks = len(self.blocks) // self.chunk_blocks
        await self.paged(OUT, chunks)()
        for storage in storages:
            storage.zero_()
        await self.paged(IN, chunks)()
        if not all(map(torch.equal, storages, kept)):
            raise RuntimeError("the loaded cache differs from the stored one")

    def nbytes(self, chunks: int) -> int:
        return chunks * self.layout.payload_bytes(self.chunk_blocks)

    def paged(self, way: str, chunks: int, *, fenced: bool = True) -> Copy:
        """Return the copier's copy of the first `chunks` chunks.

        Args:
            way: `OUT` or `IN`.
            chunks: Number of chunks.
            fenced: Wait for the work submitted to the model's stream before, as in a server.
        """
        jobs = self._jobs(chunks)

        async def copy() -> None:
            fence = self.copier.fence() if fenced else None
            await (self.copier.gather if way == OUT else self.copier.scatter)(jobs, fence)

        return copy

    def plain(self, way: str, sizes: Sequence[int]) -> Copy:
        """Return contiguous pinned copies of these sizes in bytes, one after the other on one stream."""
        streams = self.gpu.streams()
        stream = streams.open(0)
        ends = list(accumulate(sizes))
        host = torch.from_numpy(self.host)
        pairs = [
            (self.piece[end - size : end], host[end - size : end])
            for size, end in zip(sizes, ends, strict=True)
        ]
        if way == IN:
            pairs = [(there, here) for here, there in pairs]

        async def copy() -> None:
            with streams.use(stream):
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                self.gpu.spin()

        return copy

    def pieces(self, chunks: int) -> list[int]:
        """Return the bytes of each copy that the copier makes over the bus."""
        return self.copier.copies([self.chunk_blocks] * chunks)

    def parameters(self, chunks: int) -> dict[str, Parameter]:
        return {
            "chunks": chunks,
            "bytes": self.nbytes(chunks),
            "pieces": len(self.pieces(chunks)),
            "planes": self.layout.num_planes,
            "row_bytes": max(plane.row_bytes for plane in self.layout.planes),
            "mover": type(self.copier.mover).__name__,
            "gpu": self.gpu.name,
        }

    def _jobs(self, chunks: int) -> list[CopyJob]:
        size = self.layout.payload_bytes(self.chunk_blocks)
        return [
            CopyJob(
                self.blocks[chunk * self.chunk_blocks : (chunk + 1) * self.chunk_blocks],
                self.host[chunk * size : (chunk + 1) * size],
            )
            for chunk in range(chunks)
        ]


def rate(copy: Copy, nbytes: int) -> Probe:
    """Return a probe of the GB/s of one copy, by the clock of its caller."""

    async def probe() -> float:
        start = time.perf_counter()
        await copy()
        return nbytes / (time.perf_counter() - start) / 1e9

    return probe


WANTED_SLOWDOWN = 1.02


def load_cases(copies: Copies, products: Products, count: int, chunks: int, priority: int) -> list[Case]:
    """Return two cases per direction: products with concurrent copies, and copies with concurrent products.

    The copies wait for no fence: behind the submitted products, they would not run concurrently.

    Args:
        copies: The cache.
        products: The load.
        count: Products submitted at once.
        chunks: Chunks of one batch. Batches follow each other for as long as the products last.
        priority: Priority of the side streams.
    """
    cases = []
    nbytes = copies.nbytes(chunks)
    parameters: dict[str, Parameter] = {**copies.parameters(chunks), "products": count, "priority": priority}
    level = "high" if priority else "low"
    for way in (OUT, IN):
        paged = copies.paged(way, chunks, fenced=False)
        plain = copies.plain(way, copies.pieces(chunks))
        cases += [
            Case(
                f"product beside {way}, priority {level}",
                "ms",
                _product(products, count, paged),
                {
                    "product alone": _product(products, count, None),
                    "product beside memcpy": _product(products, count, plain),
                },
                {**parameters, "wanted": WANTED_SLOWDOWN},
            ),
            Case(
                f"{way} beside a product, priority {level}",
                "GB/s",
                _copies(products, count, paged, nbytes),
                {
                    f"{way} alone": _copies(products, 0, paged, nbytes),
                    "memcpy beside a product": _copies(products, count, plain, nbytes),
                },
                parameters,
            ),
        ]
    return cases


class Beside(NamedTuple):
    """Time and cycles of one product, and the rate of the copies meanwhile."""

    milliseconds: float
    cycles: float
    gb_per_s: float


async def products_beside(
    products: Products, count: int, copy: Copy | None = None, nbytes: int = 0
) -> Beside:
    """Run products while copies of `nbytes` follow each other, at least one.

    The rate is that of the copies that end before the products; of the first one, if there are none.
    """
    running = products.ask(count)
    start, ends = time.perf_counter(), list[float]()
    while copy is not None and not (ends and running.ended()):
        await copy()
        ends.append(time.perf_counter() - start)
    milliseconds = running.milliseconds()  # the device is idle before the next measurement
    meanwhile = ends[:-1] or ends  # the products ended during the last one
    return Beside(
        milliseconds,
        running.cycles(),
        nbytes * len(meanwhile) / meanwhile[-1] / 1e9 if meanwhile else 0.0,
    )


def _product(products: Products, count: int, copy: Copy | None) -> Probe:
    """Milliseconds of one product on the device."""

    async def probe() -> float:
        return (await products_beside(products, count, copy)).milliseconds

    return probe


def _copies(products: Products, count: int, copy: Copy, nbytes: int) -> Probe:
    """GB/s of the copies beside the products."""

    async def probe() -> float:
        return (await products_beside(products, count, copy, nbytes)).gb_per_s

    return probe if count else rate(copy, nbytes)


UNIT = "GB/s"
WANTED_RATIO = 0.95
PRIORITIES = (0, -1)
_HOST_SHARE = 0.75  # of the free memory, by default


def _models(text: str) -> str:
    """Check names of models."""
    unknown = [name for name in text.split(",") if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no model {unknown[0]!r}; there are: {', '.join(MODELS)}")
    return text


def _gib_or_zero(text: str) -> int:
    return 0 if text == "0" else count(text)


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    models: str = option(",".join(MODELS), "names of models, separated by commas", parse=_models)
    host_gib: int = option(
        0, "maximum GiB of pinned host memory; 0 for three quarters of the free memory", parse=_gib_or_zero
    )
    products: int = option(100, "matrix products submitted at once, as the load during copies")
    product_size: int = option(8192, "rows and columns of their matrices")
    chunks: tuple[int, ...] = field(default=(1, 8, 64))
    load_chunks: int = field(default=8)
    layers: int = field(default=0)  # 0: each model's own


QUICK = Settings(products=2, product_size=256, chunks=(1, 2), load_chunks=2, layers=2)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    async for row in measure(settings, frame, CudaGpu()):
        yield row


async def measure(settings: Settings, frame: Frame, gpu: Gpu) -> AsyncIterator[Row]:
    """Yield all rows of this GPU. Caches that do not fit are left out."""
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
    """Return the caches that fit both memories, with numbers of chunks in ascending order."""
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
            return await mean_figure(frame, probe)

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
