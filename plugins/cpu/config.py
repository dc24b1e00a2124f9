"""Options of the cpu tier."""

from lmcache_async.config.values import OptionalSize
from lmcache_async.tiers.base import TierConfig


class CPUConfig(TierConfig):
    """Options of the cpu tier.

    Attributes:
        max_bytes: Most bytes of the arena, counted in whole slabs, that chunks may keep; all of it
            by default. The rest is left to requests on their way to and from other tiers.
    """

    max_bytes: OptionalSize = None
