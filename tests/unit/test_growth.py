"""A full engine does not grow in objects and entries with further new prompts."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lmcache_async.cache_engine import LMCacheEngine
from lmcache_async.config import load_config
from lmcache_async.tiers.eviction import MIN_HINTS

ITERATIONS = 80
"""More prompts than fill memory and disk (51 and 102 chunks), with two chunks each."""
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


def test_new_keys_and_new_request_ids_leave_nothing_behind(tmp_path):
    with small_engine(str(tmp_path)) as engine:
        engine.lookup(range(2 * MIN_HINTS * CHUNK_SIZE))  # one never stored, longer than the remembered hints
        for number in range(ITERATIONS):
            iterate(engine, number)
        gc.collect()
        first, objects = entries(engine), len(gc.get_objects())
        for number in range(ITERATIONS, 2 * ITERATIONS):
            iterate(engine, number)
        gc.collect()
        second, more_objects = entries(engine), len(gc.get_objects())

        statistics = engine.statistics()

    assert statistics.tiers["cpu"].evictions > 2 * ITERATIONS
    assert statistics.tiers["disk"].evictions > ITERATIONS
    hints = [count for place, count in second.items() if place.endswith("._hints")]
    assert len(hints) == 2, "the policies of memory and disk are not found"
    assert all(0 < count <= MIN_HINTS for count in hints)
    grown = {place: count for place, count in (second - first).items() if count > 2}
    assert grown == {}
    assert more_objects - objects < ITERATIONS // 2
