"""Every record read and proven, in the order of the directory's index, at a bounded rate."""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from typing import TYPE_CHECKING

from lmcache_async.memory.proof import PIECE_BYTES
from lmcache_async.tiers.base import ScrubReport

if TYPE_CHECKING:
    from lmcache_async.plugins.disk.store import RecordStore


async def scrub(store: RecordStore, max_bytes_per_s: int | None) -> ScrubReport:
    """Prove what the store has now; records put meanwhile are for the next time.

    One record at a time, through memory of its own: neither slabs nor more than one thread are used. What
    is read for it does not count as used.
    """
    chunks = nbytes = errors = 0
    corrupt: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    due = loop.time()
    scratch = memoryview(mmap.mmap(-1, PIECE_BYTES))  # aligned
    for key in tuple(store.index):
        proven = await store.prove(key, scratch)
        if proven is None:
            continue
        nbytes += proven.nbytes
        chunks += proven.cause == ""
        errors += proven.cause == "error"
        if proven.cause not in {"", "error"}:
            corrupt[proven.cause] += 1
        if max_bytes_per_s is not None:
            due = max(due, loop.time() - 1) + proven.nbytes / max_bytes_per_s
            await asyncio.sleep(max(0.0, due - loop.time()))
    return ScrubReport(chunks=chunks, bytes=nbytes, corrupt=dict(corrupt), errors=errors)
