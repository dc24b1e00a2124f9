"""Store and load on disk with checksums, compared with the same without.

Each round stores and loads the same amount with and without checksums, in a random order, in separate
directories and with direct I/O. A store ends when everything is on disk, a load when everything is in the KV
cache.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from lmcache_async.bench.disk import make_cache, open_disk, probes
from lmcache_async.bench.measure import Case, Frame, Parameter, Probe, Row
from lmcache_async.bench.memory import PromptCache
from lmcache_async.engine.engine import CacheEngine
from tools.benchmarks.command import option

UNIT = "GB/s"
RECORD_MIB = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options; see docs/benchmarks.md."""

    path: str = option("", "directory to write in; by default that for temporary files", parse=str)
    chunks: int = option(256, "records of 2 MiB of each store and each load")


QUICK = Settings(chunks=2)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    cache = make_cache(RECORD_MIB, settings.chunks)
    parameters: dict[str, Parameter] = {"record_bytes": cache.slab_bytes, "records": cache.num_chunks}
    async with contextlib.AsyncExitStack() as stack:
        path = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=settings.path or None, prefix="checksums"))
        )
        with_ = await stack.enter_async_context(open_disk(cache, path / "with"))
        without = await stack.enter_async_context(open_without(cache, path / "without"))
        cases = [
            Case(verb, UNIT, probe, {"without": without_checksums(limit)}, parameters)
            for verb, probe, limit in zip(
                ("store", "load"), probes(cache, with_), probes(cache, without), strict=True
            )
        ]
        for row in await frame.compare(cases):
            yield row


@contextlib.asynccontextmanager
async def open_without(cache: PromptCache, path: Path) -> AsyncIterator[CacheEngine]:
    """Open an engine that verifies no payloads, and whose copies compute no checksums."""
    with mock.patch("lmcache_async.device.cpu.can_digest", _cannot_digest):
        async with open_disk(cache, path, **{"retrieve.verify": False}) as engine:
            yield engine


def without_checksums(probe: Probe) -> Probe:
    async def measure() -> float:
        with mock.patch("lmcache_async.stages.seal.payload_checksum", _no_checksum):
            return await probe()

    return measure


def _cannot_digest(groups: object) -> bool:
    return False


def _no_checksum(payload: memoryview) -> bytes:
    return bytes(16)
