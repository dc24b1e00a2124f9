"""Construction of the configured tiers with their layers."""

from __future__ import annotations

from lmcache_async.config import EngineConfig, LayerSpec, TierSpec, validate_options
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.metrics import EngineMetrics, TierMetrics
from lmcache_async.registry import LAYERS, TIERS, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.handle import TierHandle, Watcher
from lmcache_async.tiers.middleware.base import Layer, LayerContext, Shared
from lmcache_async.tiers.stack import StackedTier
from lmcache_async.tiers.writer import TierWriter

USUAL_LAYERS = tuple(LayerSpec.model_validate(name) for name in ("metrics", "retry", "breaker", "deadline"))
"""Default layers, outermost first; see docs/decisions/0007."""
USUAL_ARENA_LAYERS = (LayerSpec.model_validate("metrics"),)
"""Default layers of a tier in the arena."""

TIER_CLOSE_S = 3.0
"""Longest wait for one tier's calls, and then for its closing, once nothing is queued to be written."""


def stacked_tiers(
    registry: Registry,
    config: EngineConfig,
    namespace: Namespace,
    logger: LimitedLogger,
    watcher: Watcher | None = None,
    *,
    metrics: EngineMetrics | None = None,
    chunk_bytes: int = 0,
    replica: int = 0,
) -> list[StackedTier]:
    """Return the configured tiers, not opened.

    Args:
        registry: Installed plug-ins.
        config: Configuration of the engine.
        namespace: Namespace of the keys; contains the rank.
        logger: Logger of the tiers.
        watcher: Receives the chunk events of all tiers.
        metrics: Metrics of the engine; new ones if not given.
        chunk_bytes: Bytes of the largest record. The write queue of a slow tier has room for at least one.
        replica: Number of the data-parallel replica; each has its own directories.

    Raises:
        ConfigError: A name or an option of a tier or a layer is wrong.
    """
    shared = Shared()
    metrics = metrics or EngineMetrics()
    return [
        _stacked(registry, spec, config, namespace, logger, shared, watcher, metrics, chunk_bytes, replica)
        for spec in config.tiers
    ]


def _stacked(
    registry: Registry,
    spec: TierSpec,
    config: EngineConfig,
    namespace: Namespace,
    logger: LimitedLogger,
    shared: Shared,
    watcher: Watcher | None,
    metrics: EngineMetrics,
    chunk_bytes: int,
    replica: int,
) -> StackedTier:
    third_party = config.plugins.third_party
    tier_class = registry.load_class(TIERS, spec.name, Tier, where=spec.where, third_party=third_party)
    options = validate_options(tier_class.config_type, spec.options, spec.origin)
    rank = namespace.rank if namespace.world_size > 1 else None
    tier = tier_class(options.for_process(rank=rank, replica=replica))
    in_arena = tier.capabilities.in_arena
    usual = USUAL_ARENA_LAYERS if in_arena else USUAL_LAYERS
    layers: list[Layer] = []
    # From the inside out, so that the outermost metrics layer is the last one; see TierMetrics.calls.
    for index, layer in reversed(list(enumerate(usual if spec.layers is None else spec.layers))):
        layer = placed_layer(spec, index, layer)
        context = layer_context(spec, layer, logger, shared, metrics.tier(spec.id))
        layers.insert(0, make_layer(registry, layer, context, in_arena=in_arena, third_party=third_party))
    handle = TierHandle(
        tier,
        name=spec.id,
        logger=logger,
        layers=layers,
        timeout_s=spec.timeout_s,
        open_timeout_s=spec.open_timeout_s,
        close_timeout_s=min(config.shutdown_timeout_s, TIER_CLOSE_S),
        watcher=watcher,
    )
    if in_arena or not handle.capabilities.writes:  # a tier in the arena stores a chunk at once
        return StackedTier(spec.id, handle)
    writer = TierWriter(
        handle,
        name=spec.id,
        max_bytes=config.max_pending_write_bytes,
        max_s=config.store.max_pending_write_s,
        chunk_bytes=chunk_bytes,
    )
    return StackedTier(spec.id, handle, writer)


def placed_layer(spec: TierSpec, index: int, layer: LayerSpec) -> LayerSpec:
    """Return the layer with its place in the configuration."""
    return layer.placed(spec.origin.within(("layers", index), f"layers[{index}] ({layer.id})"))


def layer_context(
    spec: TierSpec, layer: LayerSpec, logger: LimitedLogger, shared: Shared, metrics: TierMetrics
) -> LayerContext:
    """Return the context for the constructor of a layer."""
    return LayerContext(
        tier=spec.id,
        layer=layer.id,
        timeout_s=spec.timeout_s,
        logger=logger,
        shared=shared,
        where=layer.where,
        metrics=metrics,
    )


def make_layer(
    registry: Registry, spec: LayerSpec, context: LayerContext, *, in_arena: bool, third_party: bool
) -> Layer:
    """Return a configured layer.

    Args:
        registry: Installed plug-ins.
        spec: Configuration of the layer.
        context: Context of the layer.
        in_arena: Whether the tier stores its chunks in the arena.
        third_party: Whether plug-ins of other distributions may be loaded.

    Raises:
        ConfigError: No layer has this name, the class is not a layer, or it does not fit the tier.
        MissingDependencyError: A required package is not installed.
    """
    where = context.where
    layer_class = registry.load_class(LAYERS, spec.name, Layer, where=where, third_party=third_party)
    if in_arena and not layer_class.fits_arena:
        raise ConfigError(
            f"{where}: a tier in host memory answers at once and shares its buffers with all readers; take the"
            f" layer {spec.name!r} out of its `layers`"
        )
    options = validate_options(layer_class.options_type, spec.options, spec.origin, beside=("id",))
    return layer_class(options, context)
