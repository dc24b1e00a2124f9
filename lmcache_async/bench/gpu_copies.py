"""Copies of a paged cache by the copier, and pinned copies of as many bytes in one piece."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from lmcache_async.bench.gpu_caches import CHUNK_BLOCKS, STAGING_BYTES
from lmcache_async.device.copier import CopyJob
from lmcache_async.device.cuda import CudaCopier

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from lmcache_async.bench.frame import Parameter, Probe
    from lmcache_async.bench.gpu_caches import Shape
    from lmcache_async.bench.gpu_device import Gpu, HostBytes
    from lmcache_async.device.layout import KVLayout
    from lmcache_async.types import BlockIds

Copy: TypeAlias = "Callable[[], Awaitable[None]]"
"""Copies once, to the end."""

OUT, IN = "D2H", "H2D"


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """One paged cache, its copier, and memory of the same size in one piece on the device and, pinned, on the host.

    Attributes:
        blocks: The cache's blocks in no order; chunk i has the i-th `CHUNK_BLOCKS` of them.
    """

    gpu: Gpu
    layout: KVLayout
    copier: CudaCopier
    blocks: BlockIds
    piece: torch.Tensor
    host: HostBytes

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, gpu: Gpu, shape: Shape, chunks: int, host: HostBytes, *, priority: int = 0
    ) -> Iterator[Copies]:
        """A cache of `chunks` chunks; `host` has room for them."""
        layout = shape.build(chunks * CHUNK_BLOCKS, gpu.device)
        blocks = np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int64)
        copier = CudaCopier(
            layout,
            staging_bytes=STAGING_BYTES,
            store_priority=priority,
            load_priority=priority,
            streams=gpu.streams(),
            mover=gpu.mover(layout),
        )
        try:
            size = layout.payload_bytes(layout.num_blocks)
            piece = torch.empty(size, dtype=torch.uint8, device=gpu.device)
            yield cls(gpu, layout, copier, blocks, piece, host[:size])
        finally:
            copier.close()

    async def check(self) -> None:
        """Take all of the cache out, wipe it, and load it again.

        Raises:
            RuntimeError: It came back otherwise, so that there is nothing to measure.
        """
        storages = self.layout.storages
        ends = accumulate(storage.numel() for storage in storages)
        kept = [self.piece[end - len(storage) : end] for storage, end in zip(storages, ends, strict=True)]
        for storage, copy in zip(storages, kept, strict=True):
            copy.copy_(storage)
        chunks = len(self.blocks) // CHUNK_BLOCKS
        await self.paged(OUT, chunks)()
        for storage in storages:
            storage.zero_()
        await self.paged(IN, chunks)()
        if not all(map(torch.equal, storages, kept)):
            raise RuntimeError("a cache came back otherwise than it was")

    def nbytes(self, chunks: int) -> int:
        return chunks * self.layout.payload_bytes(CHUNK_BLOCKS)

    def paged(self, way: str, chunks: int, *, fenced: bool = True) -> Copy:
        """The copier's copy of the first `chunks` chunks.

        Args:
            fenced: Behind what the model's stream was asked until then, as in a server.
        """
        jobs = self._jobs(chunks)

        async def copy() -> None:
            fence = self.copier.fence() if fenced else None
            await (self.copier.gather if way == OUT else self.copier.scatter)(jobs, fence)

        return copy

    def plain(self, way: str, sizes: Sequence[int]) -> Copy:
        """Pinned copies of so many bytes each, one after the other on one stream, between memory in one piece."""
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
                ended = streams.record_current()  # this thread spins on it: the soonest that can be known
            ended.synchronize()

        return copy

    def pieces(self, chunks: int) -> list[int]:
        """Bytes of each copy that the copier makes over the bus."""
        return self.copier.copies([CHUNK_BLOCKS] * chunks)

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
        size = self.layout.payload_bytes(CHUNK_BLOCKS)
        return [
            CopyJob(
                self.blocks[chunk * CHUNK_BLOCKS : (chunk + 1) * CHUNK_BLOCKS],
                self.host[chunk * size : (chunk + 1) * size],
            )
            for chunk in range(chunks)
        ]


def rate(copy: Copy, nbytes: int) -> Probe:
    """GB/s of one copy, by the clock of who waits for it."""

    async def probe() -> float:
        start = time.perf_counter()
        await copy()
        return nbytes / (time.perf_counter() - start) / 1e9

    return probe
