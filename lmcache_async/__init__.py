"""The KV cache layer under LLM serving: async stages, pluggable tiers, never wrong.

Public names only; see `docs/` for what they are about.
"""

from lmcache_async.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_async.config import EngineConfig, load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import (
    BudgetExceededError,
    ChainError,
    ChunkCorruptError,
    ConfigError,
    EngineClosedError,
    LMCacheAsyncError,
    MissingDependencyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierPartUnavailableError,
    TierSuspendedError,
    TierUnavailableError,
    UnknownPluginError,
)
from lmcache_async.hashing import Namespace, RequestNamespace
from lmcache_async.memory.buffer import Buffer
from lmcache_async.tiers.base import Allocate, Capabilities, ScrubReport, Tier, TierConfig, TierStatistics
from lmcache_async.tiers.layers.base import ConfiguredLayer, LayerConfig, LayerContext, LayerStatistics
from lmcache_async.types import ChunkKey, RetrieveReport, StoreReport

__all__ = [
    "Allocate",
    "BudgetExceededError",
    "Buffer",
    "CacheEngine",
    "Capabilities",
    "ChainError",
    "ChunkCorruptError",
    "ChunkKey",
    "ConfigError",
    "ConfiguredLayer",
    "EngineClosedError",
    "EngineConfig",
    "KVLayout",
    "LMCacheAsyncError",
    "LMCacheEngine",
    "LMCacheEngineBuilder",
    "LayerConfig",
    "LayerContext",
    "LayerStatistics",
    "MissingDependencyError",
    "Namespace",
    "RequestNamespace",
    "RetrieveReport",
    "ScrubReport",
    "StoreReport",
    "Tier",
    "TierClosedError",
    "TierConfig",
    "TierError",
    "TierFullError",
    "TierPartUnavailableError",
    "TierStatistics",
    "TierSuspendedError",
    "TierUnavailableError",
    "UnknownPluginError",
    "load_config",
]
