"""The names that LMCache's users know: a synchronous engine, found by its instance id."""

from lmcache_async.engine.metadata import LMCacheEngineMetadata
from lmcache_async.engine.sync import LMCacheEngine, LMCacheEngineBuilder

__all__ = ["LMCacheEngine", "LMCacheEngineBuilder", "LMCacheEngineMetadata"]
