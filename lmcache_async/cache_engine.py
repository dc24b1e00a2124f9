"""Public names of the synchronous engine, under the module name of LMCache."""

from lmcache_async.engine.sync import LMCacheEngine, LMCacheEngineBuilder, LMCacheEngineMetadata

__all__ = ["LMCacheEngine", "LMCacheEngineBuilder", "LMCacheEngineMetadata"]
