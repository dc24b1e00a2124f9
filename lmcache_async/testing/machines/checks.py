"""What holds of an engine between two calls."""

from __future__ import annotations

import gc

from lmcache_async.engine.engine import CacheEngine


async def check_quiet(engine: CacheEngine) -> None:
    """Nothing runs or is queued, every lease is back but the tiers' and the pins', and no tier holds too much."""
    assert await engine.flush(timeout_s=30), "calls or writes do not end"
    statistics = engine.statistics()
    if statistics.arena.lingering_slabs:
        gc.collect()  # a cancelled call's traceback may still know its buffers' arrays
        statistics = engine.statistics()
    assert (statistics.running, statistics.late_calls) == (0, 0)
    kept = sum(
        stacked.tier.statistics().chunks
        for stacked in engine._parts.stack.tiers
        if stacked.tier.capabilities.in_arena
    )
    leased = statistics.arena.leased_slabs
    assert kept <= leased <= kept + statistics.pinned_chunks, f"{leased} slabs leased, {kept} kept"
    for name, writer in statistics.writers.items():
        assert (writer.queued_chunks, writer.queued_bytes) == (0, 0), f"{name} has writes queued"
    for name, tier in statistics.tiers.items():
        assert tier.max_bytes is None or tier.bytes <= tier.max_bytes, f"{name} holds too much"
