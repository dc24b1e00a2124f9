"""Everything that is wrong with a config, without opening anything: plug-ins, options, chains, files of secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lmcache_async.config import EngineConfig, LoadedConfig, TierSpec, survey_config, validate_options
from lmcache_async.config.explain import LEFT_OUT, KeyPath, placed_lines
from lmcache_async.engine.builder import default_logger
from lmcache_async.engine.secrets import retrieve_stages, store_stages
from lmcache_async.engine.tiers import layer_context, layered, load_layer, load_tier, placed_layer
from lmcache_async.errors import ChainError, ConfigError, LMCacheAsyncError, MissingDependencyError
from lmcache_async.pipeline.batch import RetrieveRequest, StoreRequest
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.report import BatchStored
from lmcache_async.pipeline.stage import Stage, StageInfo, describe
from lmcache_async.registry import STAGES, Registry
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.layers.base import Shared
from lmcache_async.types import RetrieveReport
from lmcache_async.web.opening import check_endpoint

START_ERRORS = (ConfigError, MissingDependencyError, ChainError)
"""What an engine refuses a config with."""


def load_engine_config(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> EngineConfig:
    """As `load_config`; where something is wrong, the options of tiers, layers and stages are checked too.

    Raises:
        ConfigError: Keys or values are wrong; a line for each.
    """
    loaded = survey_config(path, env, extra)
    if loaded.problems:
        raise ConfigError("\n".join(all_problems(loaded, registry or Registry())))
    return loaded.announced()


def all_problems(loaded: LoadedConfig, registry: Registry) -> list[str]:
    """A line for each mistake, of the config itself and of what it means to the installed plug-ins."""
    return [*loaded.problems, *problems(loaded.config, registry, loaded.source_of)]


def problems(
    config: EngineConfig, registry: Registry, source_of: Callable[[KeyPath], str | None] = lambda _: None
) -> list[str]:
    """A line for each thing that would keep an engine of this config from being made on this machine.

    Args:
        config: The config.
        registry: The installed plug-ins.
        source_of: The place where a key was given; None where it was not.
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
    """The error to end a start with: the one that was raised, with all other mistakes of the config.

    Args:
        error: One of START_ERRORS.
        config: The config.
        registry: The installed plug-ins.
    """
    found = problems(config, registry)
    own = [line for line in str(error).split("\n") if not any(other.endswith(line) for other in found)]
    lines = [*own, *found]
    return (type(error) if len(lines) == 1 else ConfigError)("\n".join(lines))


def make_tier(spec: TierSpec, registry: Registry, *, third_party: bool) -> Tier:
    """The tier alone, without layers, not opened.

    Raises:
        LMCacheAsyncError: Its name or its options are wrong, or a package is missing.
    """
    tier_class = load_tier(registry, spec, third_party=third_party)
    return tier_class(validate_options(tier_class.config_type, spec.options, spec.origin))


def persistent_tiers(config: EngineConfig, registry: Registry) -> list[str]:
    """The ids of the tiers whose content outlives the process; a tier that cannot be made is not among them."""
    found = []
    for spec in config.tiers:
        try:
            tier = make_tier(spec, registry, third_party=config.plugins.third_party)
            persistent = tier.capabilities.persistent
        except Exception:  # noqa: BLE001, S112 - the start and the check of the config report it
            continue
        if persistent:
            found.append(spec.id)
    return found


def _of_tier(config: EngineConfig, spec: TierSpec, registry: Registry, shared: Shared) -> Iterator[str]:
    third_party = config.plugins.third_party
    tier: Tier | None = None
    try:
        tier = make_tier(spec, registry, third_party=third_party)
    except Exception as error:  # noqa: BLE001 - whatever a plug-in of somebody else's raises
        yield from _told(error, spec.where, spec.origin.part)
    for index, layer in reversed(list(enumerate(spec.layers or ()))):
        if layer.name == LEFT_OUT:
            continue
        layer = placed_layer(spec, index, layer)
        context = layer_context(spec, layer, default_logger(), shared)
        try:
            if tier is not None:
                tier = layered(registry, layer, tier, context, third_party=third_party)
            else:  # what is wrong with its layers is told all the same
                layer_class = load_layer(registry, layer, context.where, third_party=third_party)
                validate_options(layer_class.options_type, layer.options, layer.origin, beside=("id",))
        except Exception as error:  # noqa: BLE001 - as above
            yield from _told(error, layer.where, layer.origin.part)


def _of_chain(config: EngineConfig, key: str, takes: type, gives: type, registry: Registry) -> Iterator[str]:
    where = f"{key}.stages"
    try:
        names = store_stages(config) if key == "store" else retrieve_stages(config)
    except LMCacheAsyncError as error:
        yield from _told(error, where)
        return
    stages, wrong = _stages(names, registry, where, third_party=config.plugins.third_party)
    yield from wrong
    if not wrong:
        try:
            Chain(stages).check_ends(takes, gives)
        except LMCacheAsyncError as error:
            yield from _told(error, where)


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
        except Exception as error:  # noqa: BLE001 - whatever a plug-in of somebody else's raises
            wrong += _told(error, where)
    return stages, wrong


def _lines(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except LMCacheAsyncError as error:
        return list(_told(error, ""))
    return []


def _told(error: Exception, where: str, part: str = "") -> Iterator[str]:
    """What is wrong, with its place, which an error of a plug-in's own does not know.

    Args:
        error: The error.
        where: The place.
        part: The part of the config in that place; a line that names it has a place, perhaps a nearer one.
    """
    text = str(error) if isinstance(error, LMCacheAsyncError) else f"it cannot be made: {_short(error)}"
    for line in text.split("\n"):
        has_place = not where or line.startswith(where) or (part and f": {part}: " in line)
        yield line if has_place else f"{where}: {line}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}".replace("\n", " ")
