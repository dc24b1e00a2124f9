"""Expected results of copiers: by plain indexing, and by the copier for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lmcache_async.device.copier import Copier, CopyJob, Payload
from lmcache_async.device.cpu import CpuCopier
from lmcache_async.device.layout import KVLayout
from lmcache_async.testing.caches import CacheForm, PagedCache


def assign(cache: PagedCache, rows: Sequence[int], source: PagedCache, source_rows: Sequence[int]) -> None:
    """Copy rows by plain indexing.

    Args:
        cache: Cache to copy to.
        rows: Rows of this cache; -1 is skipped.
        source: Cache to copy from.
        source_rows: Row of `source` for each of `rows`.
    """
    for row, source_row in zip(rows, source_rows, strict=True):
        for target, origin in zip(cache.tensors, source.tensors, strict=True):
            if row >= 0:
                _row(cache, target, row).copy_(_row(source, origin, source_row))


def _row(cache: PagedCache, tensor: torch.Tensor, row: int) -> torch.Tensor:
    letters = cache.form.logical
    if cache.form.granularity == "block":
        ratio = cache.form.kernel_blocks
        return tensor[row * ratio : (row + 1) * ratio]
    block, token = divmod(row, cache.form.tokens)
    at_token = tensor.select(letters.index("N"), token)
    return at_token.select(letters.replace("N", "").index("B"), block)


def host_payload(nbytes: int) -> Payload:
    return np.full(nbytes, 0xA5, np.uint8)


def job_of(
    layout: KVLayout, rows: Sequence[int], payload: Callable[[int], Payload] = host_payload
) -> CopyJob:
    """Return a job whose payload is filled with 0xA5."""
    return CopyJob(np.array(rows, np.int64), payload(layout.payload_bytes(len(rows))))


async def check_copier(
    form: CacheForm,
    open_copier: Callable[[KVLayout], Copier],
    *,
    device: str = "cpu",
    payload: Callable[[int], Payload] = host_payload,
) -> None:
    """Gather and scatter as the CPU copier does over equal bytes; all memory is compared."""
    source, target = (form.build(6, seed=seed, device=device) for seed in (0, 1))
    origin, expected = (form.build(6, seed=seed) for seed in (0, 1))
    last = source.layout.num_rows - 1
    rows, target_rows = [[last, 0, last - 1], [1, -1]], [[1, -1, last], [0, last - 1]]
    copiers = [open_copier(cache.layout) for cache in (source, target)]
    references = [CpuCopier(cache.layout) for cache in (origin, expected)]

    jobs = [job_of(source.layout, some, payload) for some in rows]
    wanted = [job_of(source.layout, some) for some in rows]
    await copiers[0].gather(jobs, copiers[0].fence())
    await references[0].gather(wanted)
    moved = [CopyJob(np.array(some), job.payload) for some, job in zip(target_rows, jobs, strict=True)]
    await copiers[1].scatter(moved, copiers[1].fence())
    await references[1].scatter(moved)
    for copier in (*copiers, *references):
        copier.close()

    assert all(np.array_equal(job.payload, want.payload) for job, want in zip(jobs, wanted, strict=True)), (
        form
    )
    for cache, reference in ((target, expected), (source, origin)):
        assert all(map(torch.equal, (storage.cpu() for storage in cache.storages), reference.storages)), form


async def check_rows_of_two_sizes(
    open_copier: Callable[[KVLayout], Copier],
    *,
    device: str = "cpu",
    payload: Callable[[int], Payload] = host_payload,
) -> None:
    """Check layers with rows of different sizes, whose offsets in staging memory come from the table."""
    for dtype, content in ((torch.float16, 6), (torch.uint8, 7)):
        narrow = torch.arange(4 * 4 * content, device=device).view(4, 1, 4, content).to(dtype)
        await _check_rows(open_copier, narrow, torch.randn(4, 2, 4, 16, device=device), payload)


async def _check_rows(
    open_copier: Callable[[KVLayout], Copier],
    narrow: torch.Tensor,
    wide: torch.Tensor,
    payload: Callable[[int], Payload],
) -> None:
    layout = KVLayout.from_block_views([narrow, wide], num_blocks=4, block_size=4)
    job = job_of(layout, [2, 0, 3], payload)
    copier = open_copier(layout)

    await copier.gather([job], copier.fence())
    expected = [tensor[[2, 0, 3]].cpu().numpy().tobytes() for tensor in (narrow, wide)]
    assert np.asarray(job.payload).tobytes() == b"".join(expected)
    await copier.scatter([CopyJob(np.array([1, -1, 2]), job.payload)])
    copier.close()

    assert torch.equal(wide[1:3], wide[[1, 3]])
    assert torch.equal(narrow[1:3], narrow[[1, 3]])
    assert wide[1].cpu().numpy().tobytes() == expected[1][: wide[0].nbytes]
