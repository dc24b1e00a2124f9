"""Chunks in the pool of a daemon that all engines of a host share."""

from lmcache_async.plugins.host.config import HostConfig
from lmcache_async.plugins.host.tier import HostTier

__all__ = ["HostConfig", "HostTier"]
