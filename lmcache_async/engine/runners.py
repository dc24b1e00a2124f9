"""An engine's chains ready to run, with what bounds them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmcache_async.config import EngineConfig
from lmcache_async.engine.builder import Parts
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.budget import ByteBudget
from lmcache_async.pipeline.batch import Batch
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.pipeline.runner import Runner
from lmcache_async.types import RetrieveReport


@dataclass(frozen=True, slots=True)
class Runners:
    """Attributes: store; retrieve; prefetch, which is a retrieve without its last stage."""

    store: Runner[BatchStored]
    retrieve: Runner[RetrieveReport]
    prefetch: Runner[Any]


def open_runners(config: EngineConfig, parts: Parts, *, max_pinned: int) -> Runners:
    """Args: max_pinned: Slabs of the arena that lookups may hold."""
    slab_bytes = parts.arena.slab_bytes
    store_in_flight, store_chunks = _store_bounds(config, parts.arena)
    in_flight, batch_chunks = _retrieve_bounds(config, parts.arena, max_pinned)
    return Runners(
        store=Runner(
            parts.store,
            batch_chunks=store_chunks,
            chunk_bytes=slab_bytes,
            budget=store_in_flight,
            failed=_store_failed,
            admit=partial(_admit_store, parts),
        ),
        retrieve=Runner(
            parts.retrieve,
            batch_chunks=batch_chunks,
            chunk_bytes=slab_bytes,
            budget=in_flight,
            failed=lambda _, cause: RetrieveReport(cause=cause),
            ends=lambda report: bool(report.cause),
        ),
        prefetch=Runner(
            Chain(parts.retrieve.stages[:-1]),
            batch_chunks=batch_chunks,
            chunk_bytes=slab_bytes,
            budget=in_flight,
            failed=lambda batch, _: batch.part(0, 0),
            ends=lambda batch: not batch.chunks or bool(getattr(batch, "cause", "")),
        ),
    )


def _store_bounds(config: EngineConfig, arena: Arena) -> tuple[ByteBudget, int]:
    """Bytes that stores may have in flight, and chunks of a batch.

    Half of the arena is left to what waits for slower tiers. A batch is at most a quarter, so that one is copied
    while another one is written, and never more than the queue of a slower tier takes.
    """
    half = arena.num_slabs * arena.slab_bytes // 2
    max_bytes = max(arena.slab_bytes, min(config.store.max_in_flight_bytes, half))
    batch_bytes = min(config.store.batch_bytes, half // 2, config.max_pending_write_bytes)
    return ByteBudget(max_bytes), max(1, batch_bytes // arena.slab_bytes)


async def _admit_store(parts: Parts, batch: Batch, num_chunks: int, timeout_s: float) -> None:
    """Wait for slower tiers where a prompt is larger than the arena: only they can have all of it.

    Other stores do not wait here: they are copied as soon as there is memory, and what a slower tier's queue
    has no room for then is kept in memory alone.

    Raises:
        BudgetExceededError: They did not write enough within `timeout_s`.
    """
    if num_chunks > parts.arena.num_slabs:
        keys = [chunk.key for chunk in batch.chunks]
        batch.scope.add(await parts.stack.reserve_writes(keys, timeout_s=timeout_s))


def _retrieve_bounds(config: EngineConfig, arena: Arena, max_pinned: int) -> tuple[ByteBudget, int]:
    """Bytes that retrieves may have in flight, and chunks of a batch.

    Batches in flight wait for those before them and hold their leases meanwhile. So that a later one
    never holds what an earlier one needs, all in flight fit into the arena, beside all that is pinned.
    """
    slabs = max(1, arena.num_slabs - max_pinned)
    max_bytes = max(arena.slab_bytes, min(config.retrieve.max_in_flight_bytes, slabs * arena.slab_bytes))
    batch_bytes = min(config.retrieve.batch_bytes, max_bytes)
    return ByteBudget(max_bytes), max(1, batch_bytes // arena.slab_bytes)


def _store_failed(batch: Batch, cause: str) -> BatchStored:
    return BatchStored(present=getattr(batch, "present", 0), dropped=Counter({cause: len(batch.chunks)}))


def countdown(timeout_s: float) -> Callable[[], float]:
    """How many seconds are left of `timeout_s` from now on, by the running loop's clock; never less than 0."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    return lambda: max(0.0, deadline - clock())


class Once:
    """Calls back the first time it is called, and notes when that was."""

    def __init__(self, callback: Callable[[], None] | None) -> None:
        self._callback = callback
        self.time: float | None = None

    def __call__(self) -> None:
        if self.time is None:
            self.time = time.perf_counter()
            if self._callback is not None:
                self._callback()


def caller_is_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
