"""The paged KV cache on its device: layout, and copies to and from host memory."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_async.device.copier import Copier
from lmcache_async.device.layout import KVLayout
from lmcache_async.memory.region import request_huge_pages


def open_copiers(
    layouts: Sequence[KVLayout],
    *,
    threads: int = 2,
    huge_pages: bool = False,
    staging_bytes: int = 128 << 20,
    store_priority: int = 0,
    load_priority: int = 0,
) -> Sequence[Copier]:
    """Open a copier for each layout, for the device of their tensors.

    The copiers share copy threads (CPU) or staging memory (CUDA). Close all of them together.

    Args:
        layouts: Layouts of paged KV caches on one device, at least one.
        threads: Number of copy threads. CPU only.
        huge_pages: Request transparent huge pages for the KV caches, so that a load into blocks that were never used has
            fewer page faults. CPU only.
        staging_bytes: Bytes of device memory for each direction. CUDA only.
        store_priority: Priority of the streams of stores; 0 is the lowest, -1 the next higher. CUDA only.
        load_priority: Priority of the streams of loads. CUDA only.

    Raises:
        ValueError: There is no copier for this type of device.
    """
    device = layouts[0].device
    if device.type == "cpu":
        from lmcache_async.device.cpu import CopyThreads, CpuCopier

        if huge_pages:
            for storage in (storage for layout in layouts for storage in layout.storages):
                request_huge_pages(storage.data_ptr(), storage.nbytes)
        shared = CopyThreads(threads)
        return [CpuCopier(layout, threads=shared) for layout in layouts]
    if device.type == "cuda":
        from lmcache_async.device.cuda import open_cuda_copiers

        return open_cuda_copiers(
            layouts, staging_bytes=staging_bytes, store_priority=store_priority, load_priority=load_priority
        )
    raise ValueError(f"the KV cache is on {device}; expected a CPU or CUDA device")
