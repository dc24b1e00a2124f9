"""Construction of the configured tiers with their layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_async.config import EngineConfig, LayerSpec, TierSpec, validate_options
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.metrics import EngineMetrics, TierMetrics
from lmcache_async.registry import LAYERS, TIERS, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.base import ConfiguredLayer, LayerContext, LayerStatistics, Shared, TierLayer
from lmcache_async.tiers.layers.border import BorderLayer
from lmcache_async.tiers.layers.guard import GuardLayer
from lmcache_async.tiers.layers.notice import NoticeLayer, Watcher
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
    tier = _tier(registry, spec, namespace, replica, third_party=config.plugins.third_party)
    in_arena = tier.capabilities.in_arena
    if not in_arena:
        tier = BorderLayer(tier, name=spec.id, logger=logger)
    if watcher is not None:
        tier = NoticeLayer(tier, spec.id, watcher)
    layers = spec.layers
    if layers is None:
        layers = USUAL_ARENA_LAYERS if in_arena else USUAL_LAYERS
    for index, layer in reversed(list(enumerate(layers))):
        layer = placed_layer(spec, index, layer)
        context = layer_context(spec, layer, logger, shared, metrics.tier(spec.id))
        tier = layered(registry, layer, tier, context, third_party=config.plugins.third_party)
    if in_arena:  # never waits for I/O: no deadline, no queue; the border is outside of the layers
        return StackedTier(spec.id, BorderLayer(tier, name=spec.id, logger=logger))
    guarded = GuardLayer(
        tier,
        name=spec.id,
        timeout_s=spec.timeout_s,
        close_timeout_s=min(config.shutdown_timeout_s, TIER_CLOSE_S),
        open_timeout_s=spec.open_timeout_s,
        logger=logger,
    )
    if not guarded.capabilities.writes:
        return StackedTier(spec.id, guarded)
    writer = TierWriter(
        guarded,
        name=spec.id,
        max_bytes=config.max_pending_write_bytes,
        max_s=config.store.max_pending_write_s,
        chunk_bytes=chunk_bytes,
    )
    return StackedTier(spec.id, guarded, writer)


def _tier(
    registry: Registry, spec: TierSpec, namespace: Namespace, replica: int, *, third_party: bool
) -> Tier:
    tier_class = registry.load_class(TIERS, spec.name, Tier, where=spec.where, third_party=third_party)
    options = dict(spec.options)
    if "subdirectory" in tier_class.config_type.model_fields:
        options |= _own_subdirectory(options, namespace, replica)
    return tier_class(validate_options(tier_class.config_type, options, spec.origin))


def _own_subdirectory(options: Mapping[str, Any], namespace: Namespace, replica: int) -> dict[str, str]:
    """Return the option `subdirectory` that is unique to this process.

    The first replica has the directories of an engine without replicas, and so keeps its records when
    replicas are added.
    """
    given = options.get("subdirectory")
    rank = f"rank-{namespace.rank}" if namespace.world_size > 1 else ""
    if replica == 0:
        return {"subdirectory": rank} if rank and given is None else {}
    own = f"dp{replica}-{rank}" if rank else f"dp{replica}"
    return {"subdirectory": f"{given}/{own}" if given else own}


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


def layered(
    registry: Registry, spec: LayerSpec, inner: Tier, context: LayerContext, *, third_party: bool
) -> Tier:
    """Return the configured layer around the tier `inner`.

    Raises:
        ConfigError: No layer has this name, the class is not a layer, or it does not fit the tier.
        MissingDependencyError: A required package is not installed.
    """
    where = context.where
    layer_class = registry.load_class(
        LAYERS, spec.name, ConfiguredLayer, where=where, third_party=third_party
    )
    if inner.capabilities.in_arena and not layer_class.fits_arena:
        raise ConfigError(
            f"{where}: a tier in host memory answers at once and shares its buffers with all readers; take the"
            f" layer {spec.name!r} out of its `layers`"
        )
    options = validate_options(layer_class.options_type, spec.options, spec.origin, beside=("id",))
    return layer_class(inner, options, context)


def layer_statistics(tier: Tier) -> dict[str, LayerStatistics]:
    """Return the statistics of the layers around a tier, by layer id."""
    told: dict[str, LayerStatistics] = {}
    while isinstance(tier, TierLayer):
        if isinstance(tier, ConfiguredLayer) and (statistics := tier.layer_statistics()) is not None:
            told[tier.context.layer] = statistics
        tier = tier.inner
    return told
