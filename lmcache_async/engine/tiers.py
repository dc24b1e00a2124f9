"""Construction of the configured tiers with their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lmcache_async.config import EngineConfig, LayerSpec, TierSpec, validate_options
from lmcache_async.config.validation import PLACEHOLDER
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import Namespace
from lmcache_async.logging import LimitedLogger
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.registry import LAYERS, TIERS, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.handle import TierHandle, Watcher
from lmcache_async.tiers.middleware.base import Layer, LayerContext
from lmcache_async.tiers.stack import StackedTier
from lmcache_async.tiers.writer import TierWriter

USUAL_LAYERS = tuple(LayerSpec.model_validate(name) for name in ("metrics", "retry", "breaker", "deadline"))
"""Default layers, outermost first; see docs/decisions/0007."""
USUAL_ARENA_LAYERS = (LayerSpec.model_validate("metrics"),)
"""Default layers of a tier in the arena."""

TIER_CLOSE_S, MIN_CLOSE_S = 3.0, 0.1
"""Maximum and minimum of the time limit for the running calls of a tier, and again for its closing, in seconds. They apply after
its queue was written. With the minimum, a working tier can close even if `shutdown_timeout_s` is 0."""


def stacked_tiers(
    registry: Registry,
    config: EngineConfig,
    namespace: Namespace,
    logger: LimitedLogger,
    watcher: Watcher | None = None,
    *,
    memory_watcher: Watcher | None = None,
    metrics: EngineMetrics | None = None,
    chunk_bytes: int = 0,
    replica: int = 0,
) -> list[StackedTier]:
    """Return the configured tiers, not opened.

    The write queue of a slow tier has room for at least one record of `chunk_bytes`.

    Raises:
        ConfigError: A name or an option of a tier or a layer is wrong.
    """
    rank = namespace.rank if namespace.world_size > 1 else None
    stacked = []
    for spec, tier, layers in configured_tiers(
        registry, config, logger, metrics or EngineMetrics(), rank=rank, replica=replica
    ):
        handle = TierHandle(
            tier,
            name=spec.id,
            logger=logger,
            layers=layers,
            timeout_s=spec.timeout_s,
            open_timeout_s=spec.open_timeout_s,
            close_timeout_s=min(max(config.shutdown_timeout_s, MIN_CLOSE_S), TIER_CLOSE_S),
            watcher=watcher,
            memory_watcher=memory_watcher,
        )
        writer = None
        # A tier in the arena stores a chunk at once.
        if handle.capabilities.writes and not handle.capabilities.in_arena:
            writer = TierWriter(
                handle,
                max_bytes=config.max_pending_write_bytes,
                max_s=config.store.max_pending_write_s,
                chunk_bytes=chunk_bytes,
            )
        stacked.append(StackedTier(spec.id, handle, writer))
    return stacked


def configured_tiers(
    registry: Registry,
    config: EngineConfig,
    logger: LimitedLogger,
    metrics: EngineMetrics,
    *,
    rank: int | None = None,
    replica: int = 0,
    at: Callable[[str, str], AbstractContextManager[object]] = lambda where, part: nullcontext(),
) -> Iterator[tuple[TierSpec, Tier, list[Layer]]]:
    """Create each configured tier, not opened, with its layers, outermost first.

    Args:
        at: Returns a context in which a tier or layer is created, given its place and part of the configuration. If the
            context suppresses an error, that tier or layer is left out.

    Raises:
        LMCacheAsyncError: A name or an option is wrong, a package is missing, or parts do not fit together.
    """
    third_party = config.plugins.third_party
    shared: dict[str, Any] = {}
    arena_tiers: dict[str, TierSpec] = {}
    for spec in config.tiers:
        tier: Tier | None = None
        in_arena = False
        with at(spec.where, spec.origin.part):
            made = make_tier(spec, registry, third_party=third_party, rank=rank, replica=replica)
            in_arena = made.capabilities.in_arena
            tier = made
            if in_arena and (other := arena_tiers.setdefault(spec.name, spec)) is not spec:
                raise ConfigError(
                    f"{spec.where}: the tier {other.id!r} keeps chunks in the arena too, and neither could evict"
                    " chunks that both have; remove one of them"
                )
        usual = USUAL_ARENA_LAYERS if in_arena else USUAL_LAYERS
        layers: list[Layer] = []
        # From the inside out, so that the outermost metrics layer is the last one; see TierMetrics.calls.
        for index, named in reversed([*enumerate(usual if spec.layers is None else spec.layers)]):
            layer = named.placed(spec.origin.within(("layers", index), f"layers[{index}] ({named.id})"))
            if layer.name == PLACEHOLDER:
                continue
            with at(layer.where, layer.origin.part):
                layer_class = registry.load_class(
                    LAYERS, layer.name, Layer, where=layer.where, third_party=third_party
                )
                if in_arena and not layer_class.fits_arena:
                    raise ConfigError(
                        f"{layer.where}: a tier in host memory answers at once and shares its buffers with all"
                        f" readers; remove the layer {layer.name!r} from its `layers`"
                    )
                options = validate_options(
                    layer_class.options_type, layer.options, layer.origin, beside=("id",)
                )
                context = LayerContext(
                    tier=spec.id,
                    layer=layer.id,
                    timeout_s=spec.timeout_s,
                    logger=logger,
                    shared=shared,
                    where=layer.where,
                    metrics=metrics.tier(spec.id),
                )
                layers.insert(0, layer_class(options, context))
        if tier is not None:
            yield spec, tier, layers


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
