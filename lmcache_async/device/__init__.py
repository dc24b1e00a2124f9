"""The paged KV cache on its device: layout, and copies to and from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_async.device.copier import Copier
    from lmcache_async.device.layout import KVLayout


def open_copier(
    layout: KVLayout,
    *,
    threads: int = 2,
    staging_bytes: int = 64 << 20,
    store_priority: int = 0,
    load_priority: int = 0,
) -> Copier:
    """Open the copier for the device of the tensors of a layout.

    Args:
        layout: Layout of the paged KV cache.
        threads: Number of copy threads. CPU only.
        staging_bytes: Bytes of device memory for each direction. CUDA only.
        store_priority: Priority of the streams of stores; 0 is the lowest, -1 the next higher. CUDA only.
        load_priority: Priority of the streams of loads. CUDA only.

    Raises:
        ValueError: There is no copier for this type of device.
    """
    if layout.device.type == "cpu":
        from lmcache_async.device.cpu import CpuCopier

        return CpuCopier(layout, threads=threads)
    if layout.device.type == "cuda":
        from lmcache_async.device.cuda import CudaCopier

        return CudaCopier(
            layout, staging_bytes=staging_bytes, store_priority=store_priority, load_priority=load_priority
        )
    raise ValueError(f"the KV cache is on {layout.device}; expected a CPU or CUDA device")
