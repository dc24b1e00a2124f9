"""What checksums cost: an engine stores to disk and loads from it with them and without, in turn.

Each round stores and loads the same amount with checksums and without, in a random order, in directories of
their own and around the page cache. A store ends when everything is on disk; a load when everything is in
the KV cache.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import xxhash

from lmcache_async.bench.command import main as command
from lmcache_async.bench.disk import Moved, open_disk, retrieves, stores
from lmcache_async.bench.frame import Case, option

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from lmcache_async.bench.frame import Frame, Parameter, Probe, Row
    from lmcache_async.engine.engine import CacheEngine

UNIT = "GB/s"
RECORD_MIB = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options; see docs/benchmarks.md."""

    path: str = option("", "directory to write in; that for temporary files by default", parse=str)
    chunks: int = option(256, "records of 2 MiB that each store and each load moves")


QUICK = Settings(chunks=2)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    moved = Moved(RECORD_MIB, settings.chunks)
    parameters: dict[str, Parameter] = {"record_bytes": moved.record_bytes, "records": moved.count}
    async with contextlib.AsyncExitStack() as stack:
        path = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=settings.path or None, prefix="checksums"))
        )
        with_ = await stack.enter_async_context(open_disk(moved.rig, path / "with"))
        without = await stack.enter_async_context(
            open_disk(moved.rig, path / "without", **{"retrieve.verify": False})
        )
        cases = [
            Case(verb, UNIT, probe(moved, with_), {"without": _without(probe, moved, without)}, parameters)
            for verb, probe in (("store", stores), ("load", retrieves))
        ]
        for row in await frame.compare(cases):
            yield row


def _without(probe: Callable[[Moved, CacheEngine], Probe], moved: Moved, engine: CacheEngine) -> Probe:
    async def without() -> float:
        fake = SimpleNamespace(xxh3_128_digest=_no_digest, xxh3_64=xxhash.xxh3_64)
        with mock.patch("lmcache_async.memory.record.xxhash", fake):
            return await probe(moved, engine)()

    return without


def _no_digest(view: memoryview) -> bytes:
    del view
    return bytes(16)


def main(arguments: Sequence[str]) -> int:
    """`python -m lmcache_async.bench.checksums`, as it was called before there were others."""
    return command(["checksums", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
