"""Every record of every tier read and proven, on call."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_async.errors import TierError
from lmcache_async.tiers.base import ScrubReport
from lmcache_async.tiers.stack import StackedTier


async def scrub(tiers: Sequence[StackedTier], max_bytes_per_s: int | None) -> dict[str, ScrubReport]:
    """One tier after the other; one that fails as a whole counts as one error."""
    reports = {}
    for stacked in tiers:
        try:
            reports[stacked.id] = await stacked.tier.scrub(max_bytes_per_s=max_bytes_per_s)
        except TierError:
            reports[stacked.id] = ScrubReport(errors=1)
    return reports
