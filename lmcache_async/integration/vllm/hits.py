"""Which kind of store a hit came from, in vLLM's own words for its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCES = {"cpu": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


def hit_sources(chunks_by_tier: Mapping[str, int], num_tokens: int) -> dict[CacheHitSource, int]:
    """Split the tokens in proportion to the hit's chunks; the parts add up to `num_tokens`."""
    total = sum(chunks_by_tier.values())
    if not num_tokens:
        return {}
    if not total:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_tokens}
    split: dict[CacheHitSource, int] = {}
    given = counted = 0
    for tier, chunks in chunks_by_tier.items():
        counted += chunks
        share = num_tokens * counted // total - given
        given += share
        source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        split[source] = split.get(source, 0) + share
    return {source: count for source, count in split.items() if count}
