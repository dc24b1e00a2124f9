"""Store and retrieve through the disk tier, compared with pwrite and pread of the same amount.

A store ends when everything is on disk, a retrieve when everything is verified and in the KV cache. The limit
writes and reads files of the same size with O_DIRECT on the same file system, with the same concurrency. If
the file system has no direct I/O, neither side uses it, and the parameter `o_direct` is false.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_async.bench.measure import MIB, UNIT, Case, Frame, Parameter, Probe, Row
from lmcache_async.bench.memory import CacheForm, PromptCache
from lmcache_async.bench.raw import RawFiles
from lmcache_async.engine.engine import CacheEngine

SUMMARY = "store and retrieve on disk, compared with pwrite and pread"
CHUNK_TOKENS = 256
THREADS = 4
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the command, and the sizes of the records, which are measured one after the other."""

    path: str = ""
    mib: int = 512
    threads: int = THREADS
    record_mib: tuple[int, ...] = (2, 16)


QUICK = {"mib": 4, "record_mib": (1,)}


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    with tempfile.TemporaryDirectory(dir=settings.path or None, prefix="lmcache-async-bench") as directory:
        for mib in settings.record_mib:
            cache = make_cache(mib, max(settings.mib // mib, 1))
            raw_path = Path(directory) / f"raw-{mib}"
            raw_path.mkdir()
            async with open_disk(cache, Path(directory) / f"records-{mib}", settings.threads) as engine:
                with RawFiles(raw_path, cache.slab_bytes, cache.num_chunks, settings.threads) as raw:
                    name = f"records of {mib} MiB"
                    facts: dict[str, Parameter] = {
                        "record_bytes": cache.slab_bytes,
                        "records": cache.num_chunks,
                        "threads": settings.threads,
                        "o_direct": raw.direct,
                    }
                    store, retrieve = probes(cache, engine)
                    cases = [
                        Case(f"store, {name}", UNIT, store, {"pwrite": raw.put}, facts),
                        Case(f"retrieve, {name}", UNIT, retrieve, {"pread": raw.get}, facts),
                    ]
                    for row in await frame.compare(cases):
                        yield row


def make_cache(mib: int, count: int) -> PromptCache:
    """Return a cache whose prompt has `count` records with payloads of `mib` MiB."""
    # K and V of 8 heads of 128 elements in bfloat16 are 4 KiB per token: 1 MiB per layer of a chunk.
    return PromptCache(CacheForm(count * CHUNK_TOKENS, layers=mib, heads=8, head_dim=128))


def open_disk(
    cache: PromptCache, path: Path, threads: int = THREADS, **settings: Any
) -> contextlib.AbstractAsyncContextManager[CacheEngine]:
    """Open an engine with a disk tier alone. Its deadlines are long; other settings have their defaults."""
    tier = {"name": "disk", "path": str(path), "max_bytes": "1TiB", "io_threads": threads, "layers": []}
    slabs = max(192 * MIB // cache.slab_bytes, 12)
    return cache.open(
        **{
            "tiers": [tier],
            "arena.max_bytes": slabs * cache.slab_bytes,
            "arena.prefault": True,
            "arena.huge_pages": True,
            "store.batch_bytes": 32 * MIB,
            "retrieve.batch_bytes": 32 * MIB,
            "store.allocate_timeout_s": TIMEOUT_S / 2,
            "store.timeout_s": TIMEOUT_S,
            "retrieve.timeout_s": TIMEOUT_S,
            **settings,
        }
    )


def probes(cache: PromptCache, engine: CacheEngine) -> tuple[Probe, Probe]:
    """Return probes of GB/s: of a store until everything is on disk, and of a retrieve."""
    return cache.probes(engine, lambda seconds: cache.arena_bytes / seconds / 1e9, flush_s=TIMEOUT_S)
