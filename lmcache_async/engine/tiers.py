"""Construction of the configured tiers with their layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_async.config import EngineConfig, LayerSpec, TierSpec, validate_options
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.metrics import EngineMetrics
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

    The write queue of a slow tier has room for at least one record of `chunk_bytes`.

    Raises:
        ConfigError: A name or an option of a tier or a layer is wrong.
    """
    layer_maker = LayerMaker(registry, config, logger, metrics or EngineMetrics())
    rank = namespace.rank if namespace.world_size > 1 else None
    stacked = []
    arena_tiers: list[TierSpec] = []
    for spec in config.tiers:
        tier = make_tier(spec, registry, third_party=config.plugins.third_party, rank=rank, replica=replica)
        in_arena = tier.capabilities.in_arena
        if in_arena:
            add_arena_tier(spec, arena_tiers)
        handle = TierHandle(
            tier,
            name=spec.id,
            logger=logger,
            layers=layer_maker.layers(spec, in_arena=in_arena),
            timeout_s=spec.timeout_s,
            open_timeout_s=spec.open_timeout_s,
            close_timeout_s=min(config.shutdown_timeout_s, TIER_CLOSE_S),
            watcher=watcher,
        )
        writer = None
        if not in_arena and handle.capabilities.writes:  # a tier in the arena stores a chunk at once
            writer = TierWriter(
                handle,
                max_bytes=config.max_pending_write_bytes,
                max_s=config.store.max_pending_write_s,
                chunk_bytes=chunk_bytes,
            )
        stacked.append(StackedTier(spec.id, handle, writer))
    return stacked


def add_arena_tier(spec: TierSpec, others: list[TierSpec]) -> None:
    """Add a tier in the arena to the `others`.

    Raises:
        ConfigError: One of them is of the same kind. Each would keep the chunks of the other from eviction.
    """
    for other in others:
        if other.name == spec.name:
            raise ConfigError(
                f"{spec.where}: the tier {other.id!r} keeps chunks in the arena too, and neither could evict chunks"
                " that both have; remove one of them"
            )
    others.append(spec)


def make_tier(
    spec: TierSpec, registry: Registry, *, third_party: bool, rank: int | None = None, replica: int = 0
) -> Tier:
    """Return the tier without layers, not opened.

    Raises:
        LMCacheAsyncError: The name or an option is wrong, or a package is missing.
    """
    tier_class = registry.load_class(TIERS, spec.name, Tier, where=spec.where, third_party=third_party)
    options = validate_options(tier_class.config_type, spec.options, spec.origin)
    return tier_class(options.for_process(rank=rank, replica=replica))


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Makes the layers of the tiers of one engine."""

    registry: Registry
    config: EngineConfig
    logger: LimitedLogger
    metrics: EngineMetrics
    shared: Shared = field(default_factory=Shared)

    def layers(self, spec: TierSpec, *, in_arena: bool) -> list[Layer]:
        """Return the layers of a tier, outermost first."""
        usual = USUAL_ARENA_LAYERS if in_arena else USUAL_LAYERS
        layers: list[Layer] = []
        # From the inside out, so that the outermost metrics layer is the last one; see TierMetrics.calls.
        for layer in reversed(placed_layers(spec, usual if spec.layers is None else spec.layers)):
            layers.insert(0, self.layer(spec, layer, in_arena=in_arena))
        return layers

    def layer(self, tier: TierSpec, spec: LayerSpec, *, in_arena: bool) -> Layer:
        """Return a layer of a tier.

        Raises:
            ConfigError: No layer has this name, the class is not a layer, or it does not fit the tier.
            MissingDependencyError: A required package is not installed.
        """
        layer_class = self.registry.load_class(
            LAYERS, spec.name, Layer, where=spec.where, third_party=self.config.plugins.third_party
        )
        if in_arena and not layer_class.fits_arena:
            raise ConfigError(
                f"{spec.where}: a tier in host memory answers at once and shares its buffers with all readers; remove"
                f" the layer {spec.name!r} from its `layers`"
            )
        options = validate_options(layer_class.options_type, spec.options, spec.origin, beside=("id",))
        context = LayerContext(
            tier=tier.id,
            layer=spec.id,
            timeout_s=tier.timeout_s,
            logger=self.logger,
            shared=self.shared,
            where=spec.where,
            metrics=self.metrics.tier(tier.id),
        )
        return layer_class(options, context)


def placed_layers(spec: TierSpec, layers: tuple[LayerSpec, ...]) -> list[LayerSpec]:
    """Return the layers of a tier with their places in the configuration."""
    return [
        layer.placed(spec.origin.within(("layers", index), f"layers[{index}] ({layer.id})"))
        for index, layer in enumerate(layers)
    ]
