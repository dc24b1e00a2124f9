"""Mooncake Store: a pool of memory over many machines, by TCP or RDMA."""

from lmcache_async.plugins.mooncake.config import MooncakeConfig
from lmcache_async.plugins.mooncake.tier import MooncakeTier

__all__ = ["MooncakeConfig", "MooncakeTier"]
