"""What checksums cost: an engine stores to disk and loads from it with them and without, in turn.

    python -m lmcache_async.bench.checksums [--json FILE] [--path DIRECTORY] [--rounds N] [--chunks N]

Each round stores and loads the same amount with checksums and without, in a random order, in directories of
their own and around the page cache. What counts is the ratio within a round: the machine is the same for
both. A store ends when everything is on disk; a load when everything is in the KV cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import xxhash

from lmcache_async.testing.rig import Rig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.engine.engine import CacheEngine

CHUNK_TOKENS = 256
MIB = 1 << 20


@dataclass(slots=True)
class Rates:
    """Bytes a second of each round."""

    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def cost(with_: Sequence[float], without: Sequence[float]) -> float:
    """How much slower it is with checksums, as a part of the rate without: the median of the rounds."""
    return statistics.median(
        1 - checked / unchecked for checked, unchecked in zip(with_, without, strict=True)
    )


async def one_round(path: Path, num_chunks: int, *, checksums: bool) -> tuple[float, float]:
    """Bytes a second of a store and of a load."""
    rig = Rig(
        layers=2,
        blocks=num_chunks * CHUNK_TOKENS // 16,
        block_size=16,
        heads=2,
        head_dim=256,
        chunk_size=CHUNK_TOKENS,
        slabs=96,
    )
    settings: dict[str, Any] = {
        "tiers": [{"name": "disk", "path": str(path), "max_bytes": "100GiB", "layers": []}],
        "arena.prefault": True,
        "store.batch_bytes": 32 * MIB,
        "retrieve.batch_bytes": 32 * MIB,
        "store.allocate_timeout_s": 60,
        "store.timeout_s": 120,
        "retrieve.timeout_s": 120,
        "retrieve.verify": checksums,
    }
    hashes: object = (
        xxhash if checksums else SimpleNamespace(xxh3_128_digest=_no_digest, xxh3_64=xxhash.xxh3_64)
    )
    with mock.patch("lmcache_async.memory.record.xxhash", hashes):
        async with rig.open(**settings) as engine:
            return await _store_and_load(rig, engine)


async def _store_and_load(rig: Rig, engine: CacheEngine) -> tuple[float, float]:
    tokens = list(range(rig.num_slots))
    nbytes = rig.num_slots // CHUNK_TOKENS * rig.slab_bytes
    start = time.perf_counter()
    await engine.store(tokens, tokens)
    if not await engine.flush(timeout_s=120):
        raise RuntimeError("the store did not end in 120 s")
    stored = time.perf_counter()
    mask = await engine.retrieve(tokens, tokens)
    loaded = time.perf_counter()
    if not bool(mask.all()):
        raise RuntimeError(
            f"{int(mask.sum())} of {len(tokens)} tokens came back: {engine.statistics().counts}"
        )
    return nbytes / (stored - start), nbytes / (loaded - stored)


def _no_digest(view: memoryview) -> bytes:
    del view
    return bytes(16)


async def measure(path: Path, rounds: int, num_chunks: int) -> dict[bool, Rates]:
    """The rates with checksums (True) and without, after a round that does not count."""
    rates = {True: Rates(), False: Rates()}
    for number in range(rounds + 1):
        for checksums in random.sample([True, False], 2):
            directory = path / f"{number}-{checksums}"
            store, load = await one_round(directory, num_chunks, checksums=checksums)
            shutil.rmtree(directory)
            if number:
                rates[checksums].store.append(store)
                rates[checksums].load.append(load)
    return rates


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--path", type=Path, help="where to write; a temporary directory by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--chunks", type=int, default=256, help="of 2 MiB, for each of the four runs of a round"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="checksums") as directory:
        rates = asyncio.run(measure(Path(directory), options.rounds, options.chunks))
    figures = {
        verb: {
            "with_gbps": round(statistics.median(getattr(rates[True], verb)) / 1e9, 3),
            "without_gbps": round(statistics.median(getattr(rates[False], verb)) / 1e9, 3),
            "cost": round(cost(getattr(rates[True], verb), getattr(rates[False], verb)), 4),
        }
        for verb in ("store", "load")
    }
    for verb, row in figures.items():
        sys.stdout.write(
            f"{verb}: {row['with_gbps']} GB/s with checksums, {row['without_gbps']} without;"
            f" they cost {row['cost']:.1%} (median of {options.rounds} rounds)\n"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
