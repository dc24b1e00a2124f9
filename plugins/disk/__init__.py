"""Local disk tier: one file per chunk, direct I/O, content kept across restarts."""

from lmcache_async.plugins.disk.config import DiskConfig
from lmcache_async.plugins.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskTier"]
