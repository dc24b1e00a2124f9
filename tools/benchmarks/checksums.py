"""Store and load on disk with checksums, compared with the same without.

Each round stores and loads the same amount with and without checksums, in a random order, in separate
directories and with direct I/O. A store ends when everything is on disk, a load when everything is in the KV
cache.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import xxhash

from lmcache_async.bench.disk import make_cache, open_disk, probes
from lmcache_async.bench.measure import Case
from tools.benchmarks.command import option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lmcache_async.bench.measure import Frame, Parameter, Probe, Row

UNIT = "GB/s"
RECORD_MIB = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options; see docs/benchmarks.md."""

    path: str = option("", "directory to write in; that for temporary files by default", parse=str)
    chunks: int = option(256, "records of 2 MiB that each store and each load moves")


QUICK = Settings(chunks=2)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    cache = make_cache(RECORD_MIB, settings.chunks)
    parameters: dict[str, Parameter] = {"record_bytes": cache.slab_bytes, "records": cache.num_chunks}
    async with contextlib.AsyncExitStack() as stack:
        path = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=settings.path or None, prefix="checksums"))
        )
        with_ = await stack.enter_async_context(open_disk(cache, path / "with"))
        without = await stack.enter_async_context(
            open_disk(cache, path / "without", **{"retrieve.verify": False})
        )
        cases = [
            Case(verb, UNIT, probe, {"without": _without(limit)}, parameters)
            for verb, probe, limit in zip(
                ("store", "load"), probes(cache, with_), probes(cache, without), strict=True
            )
        ]
        for row in await frame.compare(cases):
            yield row


def _without(probe: Probe) -> Probe:
    async def without() -> float:
        fake = SimpleNamespace(xxh3_128_digest=_no_digest, xxh3_64=xxhash.xxh3_64)
        with mock.patch("lmcache_async.memory.record.xxhash", fake):
            return await probe()

    return without


def _no_digest(view: memoryview) -> bytes:
    del view
    return bytes(16)
