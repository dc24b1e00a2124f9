"""Memory of a full engine over iterations, each with new keys and a new request id.

    python -m tools.growth --iterations 100000
    python -m tools.growth --iterations 20000 --trace

Prints a row per sample: resident memory, live Python objects, and containers of the engine with more entries than at
the previous sample. `--trace` also prints the source lines whose allocations grew in the second half. It is slow.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lmcache_async.cache_engine import LMCacheEngine
from lmcache_async.config import load_config
from tools.torture.trend import sample, trend

CHUNK_SIZE = 16
TOKENS = 2 * CHUNK_SIZE
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_LOOKED_INTO = 16
"""Entries of a container that are searched for containers."""


@contextmanager
def small_engine(path: str) -> Iterator[LMCacheEngine]:
    """Open an engine with 1 MiB of host memory and 2 MiB of disk in the directory: 51 and 102 chunks."""
    paged = [torch.zeros(2, 8, CHUNK_SIZE, 1, 64) for _ in range(2)]
    config = load_config(
        env={},
        extra={
            "chunk_size": CHUNK_SIZE,
            "arena.max_bytes": "1MiB",
            "tiers": ["cpu", {"name": "disk", "path": path, "max_bytes": "2MiB"}],
        },
    )
    with LMCacheEngine(config, kv_caches=paged) as engine:
        yield engine


def iterate(engine: LMCacheEngine, number: int) -> None:
    """Look up, store and load a unique prompt, and pin and unpin one that is never stored."""
    stored = [number % 50_000, number // 50_000, *range(TOKENS - 2)]
    missed = [number % 50_000, number // 50_000, *range(1, TOKENS - 1)]
    slots = torch.arange(TOKENS)
    engine.lookup(stored)
    engine.store(stored, slot_mapping=slots, req_id=f"store-{number}")
    engine.retrieve(stored, slot_mapping=slots, req_id=f"retrieve-{number}")
    engine.lookup(missed, lookup_id=f"lookup-{number}", pin=True)
    engine.lookup_unpin(f"lookup-{number}")


def entries(root: object) -> Counter[str]:
    """Return the number of entries of each container reachable from `root` through our objects, by path."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        place, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _CONTAINERS):
            found[place] += len(one)
            values = list(one.values() if isinstance(one, dict) else one)[:_LOOKED_INTO]
            todo += [(f"{place}[]", value) for value in values]
        elif type(one).__module__.startswith("lmcache_async"):
            todo += [(f"{place}.{name}", value) for name, value in _attributes(one)]
    return found


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    names = {name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())}
    names.update(getattr(one, "__dict__", ()))
    for name in sorted(names - {"__weakref__", "__dict__"}):
        yield name, getattr(one, name, None)


def measure(iterations: int, *, samples: int, trace: bool) -> None:
    """Print a row per sample, and the trend of resident memory after the first quarter."""
    step = max(1, iterations // samples)
    rows = []
    before: Counter[str] = Counter()
    half = None
    with tempfile.TemporaryDirectory(prefix="lmcache-async-growth-") as path, small_engine(path) as engine:
        for number in range(iterations + 1):
            if number % step == 0:
                gc.collect()
                rows.append(sample(number))
                now = entries(engine)
                grown = ", ".join(f"{place} {count}" for place, count in (now - before).most_common(4))
                before = now
                sys.stdout.write(
                    f"{number:>8} {rows[-1].rss / 2**20:8.2f} MiB {len(gc.get_objects()):>8} objects  {grown}\n"
                )
                sys.stdout.flush()
                if trace and half is None and 2 * number >= iterations:
                    tracemalloc.start(12)
                    half = tracemalloc.take_snapshot()
            iterate(engine, number)
        if half is not None:
            gc.collect()
            for line in tracemalloc.take_snapshot().compare_to(half, "lineno")[:25]:
                sys.stdout.write(f"{line}\n")
    if len(rows) >= 8:
        found = trend([row.operations for row in rows], [row.rss for row in rows])
        sys.stdout.write(
            f"second quarter {found.second_quarter / 2**20:.2f} MiB, last quarter {found.last_quarter / 2**20:.2f} MiB\n"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    measure(options.iterations, samples=options.samples, trace=options.trace)
