"""Which tier a hit came from, and what kind of store that is in vLLM's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.integration.vllm.versions import CacheHitSource

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCES = {
    "cpu": CacheHitSource.HOST,
    "host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
}
"""By the tier's name. VLLM has no word for a remote store but its word for what is not known."""


def split_tokens(chunks_by_tier: Mapping[str, int], num_tokens: int) -> dict[str, int]:
    """Split the tokens in proportion to the hit's chunks; the parts add up to `num_tokens`, none is 0."""
    total = sum(chunks_by_tier.values())
    split: dict[str, int] = {}
    given = counted = 0
    for tier, chunks in chunks_by_tier.items():
        counted += chunks
        share = num_tokens * counted // total - given if total else 0
        given += share
        if share:
            split[tier] = share
    return split


def hit_sources(
    chunks_by_tier: Mapping[str, int], num_tokens: int, kinds: Mapping[str, str]
) -> dict[CacheHitSource, int]:
    """The tokens by kind of store; they add up to `num_tokens`.

    Args:
        kinds: The tiers' names by their ids.
    """
    found: dict[CacheHitSource, int] = {}
    split = split_tokens(chunks_by_tier, num_tokens)
    for tier, tokens in split.items():
        source = _SOURCES.get(kinds.get(tier, ""), CacheHitSource.EXTERNAL_UNSPECIFIED)
        found[source] = found.get(source, 0) + tokens
    if rest := num_tokens - sum(split.values()):
        found[CacheHitSource.EXTERNAL_UNSPECIFIED] = found.get(CacheHitSource.EXTERNAL_UNSPECIFIED, 0) + rest
    return found
