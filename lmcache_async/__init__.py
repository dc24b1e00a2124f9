"""KV cache layer for LLM serving, with asynchronous stages and pluggable tiers.

Data that cannot be verified is treated as a miss. The package exports the public names; see `docs/` for their
use. The module of a name is imported on first use of the name, so that commands without tensors, such as
`lmcache-async config`, do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from lmcache_async.tiers.base import (
        Allocate,
        Capabilities,
        Medium,
        ScrubReport,
        Tier,
        TierConfig,
        TierStatistics,
    )
    from lmcache_async.tiers.middleware.base import Layer, LayerConfig, LayerContext, LayerStatistics
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
    "EngineClosedError",
    "EngineConfig",
    "KVLayout",
    "LMCacheAsyncError",
    "LMCacheEngine",
    "LMCacheEngineBuilder",
    "Layer",
    "LayerConfig",
    "LayerContext",
    "LayerStatistics",
    "Medium",
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

if not TYPE_CHECKING:  # type checkers use the imports above and reject other names
    _MODULES = (
        "errors",
        "types",
        "config",
        "hashing",
        "memory.buffer",
        "tiers.base",
        "tiers.middleware.base",
        "device.layout",
        "engine.engine",
        "cache_engine",
    )
    """Modules with the public names, in search order. Modules that import torch come last."""

    def __getattr__(name: str) -> object:
        """Import a public name on first use (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
        value = next(vars(module)[name] for module in modules if name in vars(module))
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
