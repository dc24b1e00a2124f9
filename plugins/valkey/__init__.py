"""Valkey or Redis: one server, one found by Sentinel, or a cluster."""

from lmcache_async.plugins.valkey.config import ValkeyConfig
from lmcache_async.plugins.valkey.tier import ValkeyTier

__all__ = ["ValkeyConfig", "ValkeyTier"]
