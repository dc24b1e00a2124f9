"""Options of the cpu tier."""

from lmcache_async.config.values import OptionalSize
from lmcache_async.tiers.base import TierConfig


class CPUConfig(TierConfig):
    """Options of the cpu tier.

    Attributes:
        max_bytes: Maximum bytes of stored chunks, counted in whole slabs; by default the whole arena. The rest of
            the arena is kept free for transfers to and from other tiers.
    """

    max_bytes: OptionalSize = None
