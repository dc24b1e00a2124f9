"""Typed, frozen configuration: what there is to set, and `load_config` that reads it."""

from lmcache_async.config.explain import validate_options
from lmcache_async.config.http import HTTPConfig
from lmcache_async.config.load import LoadedConfig, load_config, read_config, survey_config
from lmcache_async.config.model import (
    DEFAULT_RETRIEVE_STAGES,
    DEFAULT_STORE_STAGES,
    ArenaConfig,
    EngineConfig,
    PluginsConfig,
    RetrieveConfig,
    StoreConfig,
)
from lmcache_async.config.sizes import format_size, parse_size
from lmcache_async.config.specs import LayerSpec, TierSpec
from lmcache_async.config.values import (
    Count,
    Flag,
    Fraction,
    Name,
    Names,
    OptionalSize,
    Probability,
    Seconds,
    Size,
    Wait,
)
from lmcache_async.config.vllm import VLLMConfig

__all__ = [
    "DEFAULT_RETRIEVE_STAGES",
    "DEFAULT_STORE_STAGES",
    "ArenaConfig",
    "Count",
    "EngineConfig",
    "Flag",
    "Fraction",
    "HTTPConfig",
    "LayerSpec",
    "LoadedConfig",
    "Name",
    "Names",
    "OptionalSize",
    "PluginsConfig",
    "Probability",
    "RetrieveConfig",
    "Seconds",
    "Size",
    "StoreConfig",
    "TierSpec",
    "VLLMConfig",
    "Wait",
    "format_size",
    "load_config",
    "parse_size",
    "read_config",
    "survey_config",
    "validate_options",
]
