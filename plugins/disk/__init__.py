"""Local disk: one file a chunk, by direct I/O, kept across restarts."""

from lmcache_async.plugins.disk.config import DiskConfig
from lmcache_async.plugins.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskTier"]
