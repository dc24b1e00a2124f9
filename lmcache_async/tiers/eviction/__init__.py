"""Eviction policies of tiers."""

from lmcache_async.tiers.eviction.base import EvictionPolicy
from lmcache_async.tiers.eviction.lru import LRUPolicy

__all__ = ["EvictionPolicy", "LRUPolicy"]
