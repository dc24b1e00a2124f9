"""Store and retrieve through the disk tier, compared with pwrite and pread of the same amount.

A store ends when everything is on disk, a retrieve when everything is verified and in the KV cache. The limit
writes and reads files of the same size with O_DIRECT on the same file system, with the same concurrency. If
the file system has no direct I/O, neither side uses it, and the parameter `o_direct` is false.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.measure import MIB, UNIT, Case, rate
from lmcache_async.bench.memory import CacheForm, PromptCache
from lmcache_async.memory.region import Region

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from lmcache_async.bench.measure import Frame, Parameter, Probe, Row
    from lmcache_async.engine.engine import CacheEngine

SUMMARY = "store and retrieve on disk, beside pwrite and pread"
CHUNK_TOKENS = 256
THREADS = 4
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options of the command, except `record_mib`.

    Attributes:
        path: Directory to write in; the one for temporary files if empty.
        mib: MiB that each store and each retrieve moves.
        threads: Records that are read or written at the same time.
        record_mib: Sizes of the records, measured one after the other.
    """

    path: str = ""
    mib: int = 512
    threads: int = THREADS
    record_mib: tuple[int, ...] = (2, 16)


QUICK = Settings(mib=4, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    with tempfile.TemporaryDirectory(dir=settings.path or None, prefix="lmcache-async-bench") as directory:
        for mib in settings.record_mib:
            cache = make_cache(mib, max(settings.mib // mib, 1))
            raw_path = Path(directory) / f"raw-{mib}"
            raw_path.mkdir()
            async with open_disk(cache, Path(directory) / f"records-{mib}", settings.threads) as engine:
                with RawFiles.open(raw_path, cache.slab_bytes, cache.num_chunks, settings.threads) as raw:
                    for row in await frame.compare(_cases(mib, cache, engine, raw)):
                        yield row


def make_cache(mib: int, count: int) -> PromptCache:
    """A cache whose prompt has `count` records with payloads of `mib` MiB."""
    # K and V of 8 heads of 128 elements in bfloat16 are 4 KiB per token: 1 MiB per layer of a chunk.
    return PromptCache.of(CacheForm(count * CHUNK_TOKENS, layers=mib, heads=8, head_dim=128))


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


def store_probe(cache: PromptCache, engine: CacheEngine) -> Probe:
    """GB/s of a store of the whole prompt into an empty tier, until it is on disk."""

    async def probe() -> float:
        await engine.clear()
        return await _store(cache, engine)

    return probe


def retrieve_probe(cache: PromptCache, engine: CacheEngine) -> Probe:
    """GB/s of a retrieve of the whole prompt, until it is verified and in the KV cache."""

    async def probe() -> float:
        if await engine.lookup(cache.tokens) != len(cache.tokens):
            await _store(cache, engine)
        start = time.perf_counter()
        await cache.retrieve(engine)
        return rate(cache.arena_bytes, start)

    return probe


async def _store(cache: PromptCache, engine: CacheEngine) -> float:
    start = time.perf_counter()
    await cache.store(engine)
    if not await engine.flush(timeout_s=TIMEOUT_S):
        raise RuntimeError(f"the store did not end in {TIMEOUT_S:.0f} s")
    return rate(cache.arena_bytes, start)


def _cases(mib: int, cache: PromptCache, engine: CacheEngine, raw: RawFiles) -> list[Case]:
    parameters: dict[str, Parameter] = {
        "record_bytes": cache.slab_bytes,
        "records": cache.num_chunks,
        "threads": raw.threads,
        "o_direct": raw.direct,
    }
    name = f"records of {mib} MiB"
    return [
        Case(f"store, {name}", UNIT, store_probe(cache, engine), {"pwrite": raw.put}, parameters),
        Case(f"retrieve, {name}", UNIT, retrieve_probe(cache, engine), {"pread": raw.get}, parameters),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class RawFiles:
    """Plain files of one size, written and read by several threads.

    Attributes:
        direct: Whether the file system takes O_DIRECT. Without it the page cache is used.
        memory: One buffer per thread.
    """

    path: Path
    count: int
    threads: int
    direct: bool
    pool: ThreadPoolExecutor
    memory: list[memoryview]

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, nbytes: int, count: int, threads: int) -> Iterator[RawFiles]:
        """Use the directory `path` for `count` files of `nbytes` each, a multiple of the page size."""
        # Huge pages, as in the arena: direct I/O with them is faster.
        region = Region(
            threads * nbytes, grain_bytes=nbytes, pin=False, pin_device=None, huge_pages=True, prefault=True
        )
        memory = [region.view[at : at + nbytes] for at in range(0, threads * nbytes, nbytes)]
        for piece in memory:
            piece[:] = bytes(range(256)) * (nbytes // 256)
        with contextlib.closing(region), ThreadPoolExecutor(threads) as pool:
            direct = _takes_direct(path, memory[0][: mmap.PAGESIZE])
            yield cls(path, count, threads, direct, pool, memory)

    async def put(self) -> float:
        """Write all files again. Return GB/s."""
        for name in self._names():
            name.unlink(missing_ok=True)
        return self._all(self._write_one)

    async def get(self) -> float:
        """Read all files. Return GB/s."""
        if not all(name.exists() for name in self._names()):
            await self.put()
        return self._all(self._read_one)

    def _all(self, work: Callable[[Path, memoryview], None]) -> float:
        left = iter(self._names())

        def thread(memory: memoryview) -> None:
            for name in left:
                work(name, memory)

        start = time.perf_counter()
        list(self.pool.map(thread, self.memory))
        return rate(self.count * len(self.memory[0]), start)

    def _write_one(self, name: Path, memory: memoryview) -> None:
        with _opened(name, "xb", direct=self.direct) as file:
            if file.write(memory) != len(memory):
                raise OSError(f"{name}: short write")

    def _read_one(self, name: Path, memory: memoryview) -> None:
        with _opened(name, "rb", direct=self.direct) as file:
            if file.readinto(memory) != len(memory):
                raise OSError(f"{name}: short read")

    def _names(self) -> list[Path]:
        return [self.path / f"{index}.record" for index in range(self.count)]


def _opened(name: Path, mode: str, *, direct: bool) -> FileIO:
    return FileIO(
        name, mode, opener=lambda path, flags: os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    )


def _takes_direct(path: Path, page: memoryview) -> bool:
    name = path / "trial"
    try:
        with _opened(name, "wb", direct=True) as file:
            file.write(page)
    except OSError:
        return False
    finally:
        name.unlink(missing_ok=True)
    return True
