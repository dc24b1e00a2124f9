"""Store and retrieve through the disk tier, around the page cache, beside pwrite and pread of as many bytes.

A store ends when everything is on disk; a retrieve when everything is proven and in the KV cache. The limit
writes and reads files of the same size, as many at a time, by direct I/O on the same file system, and does
nothing else with them. Where the file system has no direct I/O neither side uses it, and the rows say so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_async.bench.frame import Case, option
from lmcache_async.memory.region import Region
from lmcache_async.testing.rig import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import numpy.typing as npt

    from lmcache_async.bench.frame import Frame, Parameter, Probe, Row
    from lmcache_async.engine.engine import CacheEngine

UNIT = "GB/s"
MIB = 1 << 20
CHUNK_TOKENS = 256
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    path: str = option("", "directory to write in; that for temporary files by default", parse=str)
    mib: int = option(512, "MiB that each store and each retrieve moves")
    threads: int = option(4, "records that are read or written at a time")
    record_mib: tuple[int, ...] = field(default=(2, 16))


QUICK = Settings(mib=4, record_mib=(1,))


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    with tempfile.TemporaryDirectory(dir=settings.path or None, prefix="lmcache-async-bench") as directory:
        path = Path(directory)
        for mib in settings.record_mib:
            moved = Moved(mib, max(settings.mib // mib, 1))
            async with open_disk(moved.rig, path / f"records-{mib}", threads=settings.threads) as engine:
                with RawFiles.open(path / f"raw-{mib}", moved, settings.threads) as raw:
                    for row in await frame.compare(_cases(moved, engine, raw)):
                        yield row


def _cases(moved: Moved, engine: CacheEngine, raw: RawFiles) -> list[Case]:
    parameters: dict[str, Parameter] = {
        "record_bytes": moved.record_bytes,
        "records": moved.count,
        "threads": raw.threads,
        "o_direct": raw.direct,
    }
    name = f"records of {moved.mib} MiB"
    return [
        Case(f"store, {name}", UNIT, stores(moved, engine), {"pwrite": raw.write}, parameters),
        Case(f"retrieve, {name}", UNIT, retrieves(moved, engine), {"pread": raw.read}, parameters),
    ]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a store and a retrieve move: `count` records with payloads of `mib` MiB."""

    mib: int
    count: int
    rig: Rig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rig = Rig(
            layers=self.mib,  # of 4 KiB a token each: K and V of 512 float32
            blocks=self.count * CHUNK_TOKENS // 16,
            block_size=16,
            heads=2,
            head_dim=256,
            chunk_size=CHUNK_TOKENS,
            slabs=max(192 // self.mib, 12),
        )
        object.__setattr__(self, "rig", rig)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Ids and rows alike."""
        return np.arange(self.rig.num_slots)

    @property
    def record_bytes(self) -> int:
        return self.rig.slab_bytes

    @property
    def nbytes(self) -> int:
        return self.count * self.record_bytes


def open_disk(
    rig: Rig, path: Path, *, threads: int = 4, **settings: Any
) -> contextlib.AbstractAsyncContextManager[CacheEngine]:
    """An engine with a disk tier alone; its deadlines are long, all else is as by default."""
    tier = {"name": "disk", "path": str(path), "max_bytes": "1TiB", "io_threads": threads, "layers": []}
    return rig.open(
        **{
            "tiers": [tier],
            "arena.prefault": True,
            "arena.huge_pages": True,
            "store.batch_bytes": 32 * MIB,
            "retrieve.batch_bytes": 32 * MIB,
            "store.allocate_timeout_s": _TIMEOUT_S / 2,
            "store.timeout_s": _TIMEOUT_S,
            "retrieve.timeout_s": _TIMEOUT_S,
            **settings,
        }
    )


def stores(moved: Moved, engine: CacheEngine) -> Probe:
    """GB/s until all is on disk, from nothing."""

    async def probe() -> float:
        await engine.clear()
        return await _store(moved, engine)

    return probe


def retrieves(moved: Moved, engine: CacheEngine) -> Probe:
    """GB/s until all is in the KV cache, proven."""

    async def probe() -> float:
        tokens = moved.tokens
        if await engine.lookup(tokens) != len(tokens):
            await _store(moved, engine)
        start = time.perf_counter()
        mask = await engine.retrieve(tokens, tokens)
        seconds = time.perf_counter() - start
        if not bool(mask.all()):
            raise RuntimeError(f"{int(mask.sum())} of {len(mask)} tokens came back: {engine.statistics()}")
        return moved.nbytes / seconds / 1e9

    return probe


async def _store(moved: Moved, engine: CacheEngine) -> float:
    start = time.perf_counter()
    report = await engine.store(moved.tokens, moved.tokens)
    if not await engine.flush(timeout_s=_TIMEOUT_S):
        raise RuntimeError(f"the store did not end in {_TIMEOUT_S:.0f} s")
    seconds = time.perf_counter() - start
    if report.stored != moved.count:
        raise RuntimeError(f"{report.stored} of {moved.count} chunks were stored: {report}")
    return moved.nbytes / seconds / 1e9


@dataclass(frozen=True, slots=True, eq=False)
class RawFiles:
    """Files of one size, written and read with nothing around it.

    Attributes:
        direct: Whether around the page cache.
    """

    path: Path
    moved: Moved
    threads: int
    direct: bool
    pool: ThreadPoolExecutor
    memory: list[memoryview]

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, moved: Moved, threads: int) -> Iterator[RawFiles]:
        path.mkdir()
        size = moved.record_bytes
        # As the arena's: direct I/O from and to huge pages is faster.
        region = Region(
            threads * size, grain_bytes=size, pin=False, pin_device=None, huge_pages=True, prefault=True
        )
        memory = [region.view[at : at + size] for at in range(0, threads * size, size)]
        for piece in memory:
            piece[:] = bytes(range(256)) * (size // 256)
        with contextlib.closing(region), ThreadPoolExecutor(threads) as pool:
            yield cls(path, moved, threads, _takes_direct(path), pool, memory)

    async def write(self) -> float:
        """GB/s of writing every file anew."""
        for name in self._names():
            name.unlink(missing_ok=True)
        return self._all(self._write_one)

    async def read(self) -> float:
        """GB/s of reading every file."""
        if not all(name.exists() for name in self._names()):
            await self.write()
        return self._all(self._read_one)

    def _all(self, work: Callable[[Path, memoryview], None]) -> float:
        names = self._names()
        left = iter(names)

        def thread(memory: memoryview) -> None:
            for name in left:  # the next one, whichever thread is free
                work(name, memory)

        start = time.perf_counter()
        list(self.pool.map(thread, self.memory))
        return self.moved.nbytes / (time.perf_counter() - start) / 1e9

    def _write_one(self, name: Path, memory: memoryview) -> None:
        with _opened(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=self.direct) as descriptor:
            if os.pwrite(descriptor, memory, 0) != len(memory):
                raise OSError(f"{name}: a short write")

    def _read_one(self, name: Path, memory: memoryview) -> None:
        with _opened(name, os.O_RDONLY, direct=self.direct) as descriptor:
            if os.preadv(descriptor, [memory], 0) != len(memory):
                raise OSError(f"{name}: a short read")

    def _names(self) -> list[Path]:
        return [self.path / f"{index}.record" for index in range(self.moved.count)]


@contextlib.contextmanager
def _opened(name: Path, flags: int, *, direct: bool) -> Iterator[int]:
    descriptor = os.open(name, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _takes_direct(path: Path) -> bool:
    name = path / "trial"
    try:
        with (
            _opened(name, os.O_WRONLY | os.O_CREAT, direct=True) as descriptor,
            mmap.mmap(-1, mmap.PAGESIZE) as page,
        ):
            os.pwrite(descriptor, page, 0)
    except OSError:
        return False
    finally:
        name.unlink(missing_ok=True)
    return True
