"""Checks of a configuration that open nothing: plug-ins, options, chains and files of secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lmcache_async.config import EngineConfig, LoadedConfig, TierSpec, survey_config, validate_options
from lmcache_async.config.validation import LEFT_OUT, KeyPath, placed_lines
from lmcache_async.engine.builder import default_logger, retrieve_stages, store_stages
from lmcache_async.engine.tiers import layer_context, make_layer, placed_layer
from lmcache_async.errors import ChainError, ConfigError, LMCacheAsyncError, MissingDependencyError
from lmcache_async.metrics.endpoint import check_endpoint
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.pipeline.stage import Stage, StageInfo, describe
from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry
from lmcache_async.tiers.base import Capabilities, Tier
from lmcache_async.tiers.middleware.base import Layer, Shared
from lmcache_async.types import RetrieveReport

START_ERRORS = (ConfigError, MissingDependencyError, ChainError)
"""Errors with which an engine refuses a configuration."""


def load_engine_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> EngineConfig:
    """Load a configuration as `load_config` does, and report mistakes in options of plug-ins too.

    Raises:
        ConfigError: Keys or values are wrong; one line for each mistake.
    """
    loaded = survey_config(path, env, extra)
    if loaded.problems:
        raise ConfigError("\n".join(all_problems(loaded, registry or Registry())))
    return loaded.announced()


def all_problems(loaded: LoadedConfig, registry: Registry) -> list[str]:
    """Return a line for each mistake in the configuration and in the options of plug-ins."""
    return [*loaded.problems, *problems(loaded.config, registry, loaded.origin.own_place)]


def problems(
    config: EngineConfig, registry: Registry, source_of: Callable[[KeyPath], str | None] = lambda _: None
) -> list[str]:
    """Return a line for each reason why this machine cannot build an engine of this configuration.

    Args:
        config: The configuration.
        registry: The installed plug-ins.
        source_of: Gives the place where a key was set; None for keys that are not set.
    """
    shared = Shared()
    found = [line for spec in config.tiers for line in _of_tier(config, spec, registry, shared)]
    rest: list[str] = []
    for key, takes, gives in (
        ("store", StoreRequest, BatchStored),
        ("retrieve", RetrieveRequest, RetrieveReport),
    ):
        rest += _of_chain(config, key, takes, gives, registry)
    rest += _lines(config.read_hash_key)
    rest += _lines(config.encryption.read_keys)
    rest += check_endpoint(config.http)
    return list(dict.fromkeys([*found, *placed_lines(rest, source_of)]))


def refusal(error: LMCacheAsyncError, config: EngineConfig, registry: Registry) -> LMCacheAsyncError:
    """Return an error with the message of `error` and all other mistakes of the configuration.

    Args:
        error: One of START_ERRORS.
        config: The configuration.
        registry: The installed plug-ins.
    """
    found = problems(config, registry)
    own = [line for line in str(error).split("\n") if not any(other.endswith(line) for other in found)]
    lines = [*own, *found]
    return (type(error) if len(lines) == 1 else ConfigError)("\n".join(lines))


def make_tier(spec: TierSpec, registry: Registry, *, third_party: bool) -> Tier:
    """Return the tier without layers, not opened.

    Raises:
        LMCacheAsyncError: The name or an option is wrong, or a package is missing.
    """
    tier_class = registry.load_class(TIERS, spec.name, Tier, where=spec.where, third_party=third_party)
    return tier_class(validate_options(tier_class.config_type, spec.options, spec.origin))


def tier_capabilities(config: EngineConfig, registry: Registry) -> dict[str, Capabilities]:
    """Return the capabilities of each tier by its id. Tiers that cannot be constructed are left out."""
    found = {}
    for spec in config.tiers:
        try:
            tier = make_tier(spec, registry, third_party=config.plugins.third_party)
            found[spec.id] = tier.capabilities
        except Exception:  # noqa: BLE001, S112 - reported at the start and by the check of the configuration
            continue
    return found


def persistent_tiers(config: EngineConfig, registry: Registry) -> list[str]:
    """Return the ids of persistent tiers. Tiers that cannot be constructed are left out."""
    return [name for name, each in tier_capabilities(config, registry).items() if each.persistent]


def _of_tier(config: EngineConfig, spec: TierSpec, registry: Registry, shared: Shared) -> Iterator[str]:
    third_party = config.plugins.third_party
    tier: Tier | None = None
    try:
        tier = make_tier(spec, registry, third_party=third_party)
    except Exception as error:  # noqa: BLE001 - a third-party plug-in may raise anything
        yield from _described(error, spec.where, spec.origin.part)
    for index, layer in reversed(list(enumerate(spec.layers or ()))):
        if layer.name == LEFT_OUT:
            continue
        layer = placed_layer(spec, index, layer)
        context = layer_context(spec, layer, default_logger(), shared, EngineMetrics().tier(spec.id))
        try:
            if tier is not None:
                make_layer(
                    registry, layer, context, in_arena=tier.capabilities.in_arena, third_party=third_party
                )
            else:  # report mistakes of the layers too
                layer_class = registry.load_class(
                    LAYERS, layer.name, Layer, where=context.where, third_party=third_party
                )
                validate_options(layer_class.options_type, layer.options, layer.origin, beside=("id",))
        except Exception as error:  # noqa: BLE001 - as above
            yield from _described(error, layer.where, layer.origin.part)


def _of_chain(config: EngineConfig, key: str, takes: type, gives: type, registry: Registry) -> Iterator[str]:
    where = f"{key}.stages"
    try:
        names = store_stages(config) if key == "store" else retrieve_stages(config)
    except LMCacheAsyncError as error:
        yield from _described(error, where)
        return
    stages, wrong = _stages(names, registry, where, third_party=config.plugins.third_party)
    yield from wrong
    if not wrong:
        try:
            Chain(stages).check_ends(takes, gives)
        except LMCacheAsyncError as error:
            yield from _described(error, where)


def _stages(
    names: Sequence[str], registry: Registry, where: str, *, third_party: bool
) -> tuple[list[StageInfo], list[str]]:
    stages: list[StageInfo] = []
    wrong: list[str] = []
    for name in names:
        try:
            stages.append(
                describe(name, cast("Stage[Any, Any]", registry.load(STAGES, name, third_party=third_party)))
            )
        except Exception as error:  # noqa: BLE001 - a third-party plug-in may raise anything
            wrong += _described(error, where)
    return stages, wrong


def _lines(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except LMCacheAsyncError as error:
        return list(_described(error, ""))
    return []


def _described(error: Exception, where: str, part: str = "") -> Iterator[str]:
    """Return the lines of an error, each with its place in the configuration.

    Args:
        error: The error.
        where: The place; added to lines without one.
        part: The part of the configuration in that place. A line that names it has a place already.
    """
    text = str(error) if isinstance(error, LMCacheAsyncError) else f"it cannot be created: {_short(error)}"
    for line in text.split("\n"):
        has_place = not where or line.startswith(where) or (part and f": {part}: " in line)
        yield line if has_place else f"{where}: {line}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}".replace("\n", " ")
