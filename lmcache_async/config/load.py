"""Load the configuration from a mapping, environment variables and a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lmcache_async.config.lmcache import (
    SUPPORTED,
    VARIABLE_PREFIX,
    found_in_mapping,
    found_in_variables,
    looks_like_lmcache,
    split_extra,
    translate,
)
from lmcache_async.config.model import EngineConfig
from lmcache_async.config.sources import (
    CONFIG_FILE,
    PREFIX,
    Precedence,
    Setting,
    mapping_settings,
    merge,
    read_file,
    refuse_secrets,
    variable_settings,
)
from lmcache_async.config.validation import (
    PLACEHOLDER,
    Loaded,
    Origin,
    explain,
    known_keys,
    show,
    validate_all,
)
from lmcache_async.config.values import expand_home
from lmcache_async.errors import ConfigError

logger = logging.getLogger(__name__)

EXTRA = "kv_connector_extra_config"
LMCACHE_FILE = VARIABLE_PREFIX + CONFIG_FILE
_DEFAULTS = Origin("defaults")
_NOTHING = EngineConfig().model_copy(update={"tiers": ()})
_ADVICE = {key: f"it is a key of LMCache; use {ours}" for key, (ours, _) in SUPPORTED.items()}


class LoadedConfig(Loaded[EngineConfig]):
    """The configuration of an engine. Its notes are about settings of LMCache."""

    def announced(self) -> EngineConfig:
        """Log a warning about settings without effect, and return the configuration."""
        if self.notes:
            logger.warning("these settings of LMCache have no effect:\n  %s", "\n  ".join(self.notes))
        return self.config


def load_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Load the configuration.

    Precedence, highest first: `extra`, `LMCACHE_ASYNC_*` variables, LMCache's `LMCACHE_*` variables, the file,
    defaults.

    Args:
        path: The YAML file. By default the file named by `extra["config_file"]`, LMCACHE_ASYNC_CONFIG_FILE or
            LMCACHE_CONFIG_FILE, in this order.
        env: The environment; by default that of the process.
        extra: vLLM's kv_connector_extra_config: nested, or with dotted keys such as `arena.max_bytes`.

    Raises:
        ConfigError: Keys or values are wrong; one line for each mistake.
    """
    return survey_config(path, env, extra).valid().announced()


def survey_config(
    path: Path | None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Load the configuration with the origins of its values and its mistakes; arguments as in `load_config`.

    Invalid values have their defaults, and invalid tiers are left out. If the file cannot be read, the configuration
    has the defaults and no tiers.
    """
    env = os.environ if env is None else env
    ours, theirs = split_extra(extra or {})
    problems: list[str] = []
    try:
        file, named_by = _config_file(path, env, ours.pop("config_file", None))
        content, origin = ({}, _DEFAULTS) if file is None else read_file(file, problems, named_by)
    except ConfigError as error:
        return LoadedConfig(_NOTHING, _DEFAULTS, problems=(str(error),))
    is_lmcache = named_by == LMCACHE_FILE
    found = [*found_in_mapping(theirs, Origin(EXTRA), Precedence.EXTRA), *found_in_variables(env)]
    settings: list[Setting] = []
    if is_lmcache or looks_like_lmcache(content):
        found += found_in_mapping(content, origin, Precedence.FILE)
    else:
        settings += mapping_settings(content, origin.place, Precedence.FILE, problems)
    translated, notes = translate(found, lambda: entry_points(group="lmcache_async.tiers").names, problems)
    notes += [
        f"{own.place}: tiers: {their.place} takes precedence over the file"
        for own in settings
        for their in translated
        if own.path == their.path == ("tiers",)
    ]
    if (lmcache_file := env.get(LMCACHE_FILE, "").strip()) and not is_lmcache:
        notes.append(f"{LMCACHE_FILE}: {lmcache_file} is not read, {file} is")
    settings += translated
    settings += variable_settings(env, problems)
    settings += mapping_settings(ours, Origin(EXTRA).place, Precedence.EXTRA, problems)
    content, origin = merge(refuse_secrets(settings, problems), origin)
    config, errors = validate_all(EngineConfig, content)
    problems += [explain(error, known_keys(EngineConfig), origin, _ADVICE) for error in errors]
    config = config or _NOTHING
    placed = [
        tier.placed(origin.within(("tiers", index), f"tiers[{index}] ({tier.id})"))
        for index, tier in enumerate(config.tiers)
        if tier.name != PLACEHOLDER
    ]
    config = config.model_copy(update={"tiers": tuple(placed)})
    return LoadedConfig(config, origin, tuple(notes), tuple(problems))


def _config_file(path: Path | None, env: Mapping[str, str], from_extra: object) -> tuple[Path | None, str]:
    """Return the file to read, or None, and the option or variable that names it."""
    if path is not None:
        return path, ""
    variables = {name: env.get(name, "").strip() or None for name in (PREFIX + CONFIG_FILE, LMCACHE_FILE)}
    for name, file in ({f"{EXTRA}: config_file": from_extra} | variables).items():
        if file is not None:
            try:
                return expand_home(file or None), name
            except ValueError as error:
                raise ConfigError(f"{name} is {show(file)}: {error}") from None
    return None, ""
