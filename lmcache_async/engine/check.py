"""Checks of a configuration without opening a tier: plug-ins, options, chains and files of secrets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from lmcache_async.config import EngineConfig, LoadedConfig, survey_config
from lmcache_async.config.validation import KeyPath, placed_lines
from lmcache_async.engine.builder import CHAIN_ENDS, chain_stages, default_logger
from lmcache_async.engine.tiers import configured_tiers
from lmcache_async.errors import ChainError, ConfigError, LMCacheAsyncError, MissingDependencyError
from lmcache_async.hashing.digest import digest_function
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.metrics.endpoint import check_endpoint
from lmcache_async.metrics.metrics import EngineMetrics
from lmcache_async.metrics.tracing import TracingInstrument
from lmcache_async.pipeline.chain import Chain
from lmcache_async.pipeline.stage import Stage, StageInfo, describe_stage
from lmcache_async.registry import STAGES, Registry
from lmcache_async.tiers.base import Capabilities

START_ERRORS = (ConfigError, MissingDependencyError, ChainError)
"""Errors with which an engine refuses a configuration."""


def load_engine_config(
    env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Load a configuration as `load_config` does without a path, and report mistakes in options of plug-ins too.

    Raises:
        ConfigError: Keys or values are wrong; one line for each mistake.
    """
    loaded = survey_config(None, env, extra)
    if loaded.problems:
        raise ConfigError("\n".join(all_problems(loaded, Registry())))
    return loaded.announced()


def all_problems(loaded: LoadedConfig, registry: Registry) -> list[str]:
    """Return a line for each mistake in the configuration and in the options of plug-ins."""
    return [*loaded.problems, *problems(loaded.config, registry, loaded.origin.own_place)]


def problems(
    config: EngineConfig, registry: Registry, source_of: Callable[[KeyPath], str | None] = lambda _: None
) -> list[str]:
    """Return a line for each reason why this machine cannot build an engine of this configuration.

    `source_of` returns the place where a key was set; None for keys that are not set.
    """
    third_party = config.plugins.third_party
    of_tiers: list[str] = []
    rest: list[str] = []
    at = partial(_collected, of_tiers)
    for _ in configured_tiers(registry, config, default_logger(), EngineMetrics(), at=at):
        pass
    for chain, ends in CHAIN_ENDS.items():
        with _collected(rest, where := f"{chain}.stages"):
            names = chain_stages(config, chain)
            stages: list[StageInfo] = []
            for name in names:
                with _collected(rest, where, what=f"the stage {name}"):
                    stage = registry.load(STAGES, name, third_party=third_party)
                    stages.append(describe_stage(name, cast("Stage[Any, Any]", stage)))
            if len(stages) == len(names):
                Chain(stages).check_ends(*ends)
    for make in (EngineConfig.read_hash_key, _make_digest, _make_cipher, _make_tracing):
        with _collected(rest, ""):
            make(config)
    rest += check_endpoint(config.http)
    return list(dict.fromkeys([*of_tiers, *placed_lines(rest, source_of)]))


def _make_digest(config: EngineConfig) -> object:
    return digest_function(config.hash_algorithm)


def _make_cipher(config: EngineConfig) -> object:
    return RecordCipher(config.encryption.read_keys()) if config.encryption.enabled else None


def _make_tracing(config: EngineConfig) -> object:
    return TracingInstrument() if config.tracing.enabled else None


def refusal(error: LMCacheAsyncError, config: EngineConfig, registry: Registry) -> LMCacheAsyncError:
    """Return an error with the message of `error`, one of START_ERRORS, and all other mistakes."""
    found = problems(config, registry)
    own = [line for line in str(error).split("\n") if not any(other.endswith(line) for other in found)]
    lines = [*own, *found]
    return (type(error) if len(lines) == 1 else ConfigError)("\n".join(lines))


def tier_capabilities(config: EngineConfig, registry: Registry) -> dict[str, Capabilities]:
    """Return the capabilities of each tier by its id. Tiers that cannot be constructed are left out."""
    ignored: list[str] = []  # reported at the start and by the check of the configuration
    at = partial(_collected, ignored)
    tiers = configured_tiers(registry, config, default_logger(), EngineMetrics(), at=at)
    return {spec.id: tier.capabilities for spec, tier, _ in tiers}


@contextlib.contextmanager
def _collected(lines: list[str], where: str, part: str = "", *, what: str = "it") -> Iterator[None]:
    """Add a line for each line of an error that the block raises.

    Args:
        lines: Lines of the errors so far.
        where: The place in the configuration; added to lines without one.
        part: The part of the configuration in that place. A line that names the part already has a place.
        what: What cannot be created, for the message of an error that is not an LMCacheAsyncError.
    """
    try:
        yield
    except LMCacheAsyncError as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001 - a third-party plug-in may raise anything
        text = f"{what} cannot be created: {type(error).__name__}: {error!s:.200}".replace("\n", " ")
    else:
        return
    for line in text.split("\n"):
        has_place = not where or line.startswith(where) or (part and f": {part}: " in line)
        lines.append(line if has_place else f"{where}: {line}")
