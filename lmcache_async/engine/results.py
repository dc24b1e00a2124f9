"""What an engine answers: merged reports, lookups, statistics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from lmcache_async.engine.tiers import layer_statistics
from lmcache_async.errors import TierError
from lmcache_async.memory.arena import Arena, ArenaStatistics
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.tiers.base import TierStatistics
from lmcache_async.tiers.layers.base import LayerStatistics
from lmcache_async.tiers.stack import TierStack
from lmcache_async.tiers.writer import WriterStatistics
from lmcache_async.types import RetrieveReport, StoreReport


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is there of a prompt.

    Attributes:
        count: Leading chunks that are there.
        by_tier: Of these, how many each tier would serve.
        pinned: Of these, how many are in host memory and stay there until they are unpinned.
        costs: Behind how many chunks a tier's run ends, and seconds to load all up to there, as measured.
    """

    count: int
    by_tier: Mapping[str, int]
    pinned: int = 0
    costs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstPresent:
    """Which of several keys is there, and whether it is pinned in host memory."""

    position: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of an engine.

    Attributes:
        arena: Host memory.
        tiers: What each tier holds, by id.
        writers: What waits before each slower tier, by id.
        layers: What the layers around each tier tell, by the tier's id and the layer's.
        counts: Events since the engine was opened, by "<tier id>.<event>".
        pinned_chunks: Chunks that lookups hold.
        running: Stores and retrieves under way.
        late_calls: Calls to tiers that their callers gave up and that have not ended yet; until they
            have, they hold the leases they work on.
        in_arena: Ids of tiers that keep chunks in host memory itself, so that nothing is copied.
    """

    arena: ArenaStatistics
    tiers: Mapping[str, TierStatistics]
    writers: Mapping[str, WriterStatistics]
    layers: Mapping[str, Mapping[str, LayerStatistics]]
    counts: Mapping[str, int]
    pinned_chunks: int
    running: int
    late_calls: int
    in_arena: frozenset[str] = frozenset()

    @classmethod
    def of(cls, arena: Arena, stack: TierStack, *, pinned_chunks: int, running: int) -> EngineStatistics:
        """As of now."""
        return cls(
            arena=arena.statistics(),
            tiers={stacked.id: stacked.tier.statistics() for stacked in stack.tiers},
            writers={s.id: s.writer.statistics() for s in stack.tiers if s.writer is not None},
            layers={stacked.id: layer_statistics(stacked.tier) for stacked in stack.tiers},
            counts=dict(stack.counts),
            pinned_chunks=pinned_chunks,
            running=running,
            late_calls=stack.late_calls,
            in_arena=frozenset(s.id for s in stack.tiers if not s.leaves_memory),
        )


def merge_stored(batches: Sequence[BatchStored], start: float, copied: float) -> StoreReport:
    """One report of a store's batches; `start` and `copied` are times of `time.perf_counter`."""
    stored = tokens = 0
    dropped: Counter[str] = Counter()
    for batch in batches:
        dropped.update(batch.dropped)
        for chunk, outcome in zip(batch.chunks, batch.outcomes, strict=True):
            cause = outcome.result() if outcome.done() else "deadline"
            if cause:
                dropped[cause] += 1
            else:
                stored += 1
                tokens += len(chunk.tokens)
    return StoreReport(
        stored=stored,
        shared=sum(map(_in_a_shared_tier, chain.from_iterable(batch.shared for batch in batches))),
        present=sum(batch.present for batch in batches),
        dropped=dropped,
        tokens=tokens,
        bytes=sum(batch.bytes for batch in batches),
        seconds=time.perf_counter() - start,
        copy_seconds=copied - start,
    )


def _in_a_shared_tier(answers: Sequence[asyncio.Future[TierError | None]]) -> bool:
    return any(answer.done() and not answer.cancelled() and answer.result() is None for answer in answers)


def merge_retrieved(batches: Sequence[RetrieveReport], asked_tokens: int, start: float) -> RetrieveReport:
    """One report of a retrieve's batches, in prefix order; the last one may have ended the prefix."""
    by_tier: Counter[str] = Counter()
    for batch in batches:
        by_tier.update(batch.by_tier)
    return RetrieveReport(
        hit_chunks=sum(batch.hit_chunks for batch in batches),
        hit_tokens=sum(batch.hit_tokens for batch in batches),
        asked_tokens=asked_tokens,
        bytes=sum(batch.bytes for batch in batches),
        seconds=time.perf_counter() - start,
        by_tier=by_tier,
        cause=batches[-1].cause if batches else "",
    )
