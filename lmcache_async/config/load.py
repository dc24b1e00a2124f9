"""Load the configuration from a mapping, environment variables and a file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.config.lmcache import (
    SUPPORTED,
    VARIABLE_PREFIX,
    found_in_mapping,
    found_in_variables,
    looks_like_lmcache,
    split_extra,
    translate,
)
from lmcache_async.config.model import EngineConfig, TierSpec
from lmcache_async.config.sources import (
    CONFIG_FILE,
    PREFIX,
    Rank,
    Setting,
    mapping_settings,
    merge,
    read_file,
    refuse_secrets,
    variable_settings,
)
from lmcache_async.config.validation import KeyPath, Origin, explain, known_keys, validate_all
from lmcache_async.config.values import parse_list
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

logger = logging.getLogger(__name__)

EXTRA = "kv_connector_extra_config"
LMCACHE_FILE = VARIABLE_PREFIX + CONFIG_FILE
_DEFAULTS = Origin("defaults")
# In place of a wrong algorithm: one that is valid with a hash key.
_STAND_INS: Mapping[KeyPath, object] = {("hash_algorithm",): "sha256"}
_NOTHING = EngineConfig().model_copy(update={"tiers": ()})


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
    return read_config(path, env, extra).announced()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration with the origins of its values.

    Attributes:
        config: The configuration; if there are problems, with the valid values only.
        origins: Origin of each key that is set. The other keys have their defaults.
        notes: A line for each setting of LMCache that has no effect.
        problems: A line for each mistake.
    """

    config: EngineConfig
    origins: Mapping[KeyPath, Origin]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def announced(self) -> EngineConfig:
        """Log a warning about settings without effect, and return the configuration."""
        if self.notes:
            logger.warning("these settings of LMCache have no effect:\n  %s", "\n  ".join(self.notes))
        return self.config

    def source_of(self, path: KeyPath) -> str | None:
        """Return the place where the value was set; None for a default."""
        for length in range(len(path), 0, -1):
            if origin := self.origins.get(path[:length]):
                return origin.at(path)
        return None


def read_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Load the configuration with its origins, without logging; arguments as in `load_config`.

    Raises:
        ConfigError: Keys or values are wrong; one line for each mistake.
    """
    loaded = survey_config(path, env, extra)
    if loaded.problems:
        raise ConfigError("\n".join(loaded.problems))
    return loaded


def survey_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Load the configuration with its origins and its mistakes; arguments as in `load_config`.

    The configuration has the valid values and tiers. It is empty if the file cannot be read.
    """
    env = os.environ if env is None else env
    ours, theirs = split_extra(extra or {})
    settings: list[Setting] = []
    problems: list[str] = []
    try:
        file, named_by = _config_file(path, env, ours.pop("config_file", None))
        content, origin = ({}, _DEFAULTS) if file is None else read_file(file, problems, named_by)
    except ConfigError as error:
        return LoadedConfig(_NOTHING, {}, problems=(str(error),))
    is_lmcache = named_by == LMCACHE_FILE
    found = found_in_mapping(theirs, Origin(EXTRA), Rank.EXTRA) + found_in_variables(env)
    if is_lmcache or looks_like_lmcache(content):
        found += found_in_mapping(content, origin, Rank.FILE)
    else:
        settings += mapping_settings(content, origin, Rank.FILE, problems)
    translated, notes = translate(found, _tier_names, problems)
    notes += _replaced_tiers(settings, translated)
    settings += translated + variable_settings(env, problems)
    settings += mapping_settings(ours, Origin(EXTRA), Rank.EXTRA, problems)
    config, origins = _build(refuse_secrets(settings, problems), problems)
    if lmcache_file := env.get(LMCACHE_FILE, "").strip():
        notes += [] if is_lmcache else [f"{LMCACHE_FILE}: {lmcache_file} is not read, {file} is"]
    return LoadedConfig(config, origins, tuple(notes), tuple(problems))


def _build(settings: Iterable[Setting], problems: list[str]) -> tuple[EngineConfig, Mapping[KeyPath, Origin]]:
    """Build the configuration of the valid settings, and add a message for each mistake to `problems`."""
    content, origins = merge(settings)
    config, errors = validate_all(EngineConfig, content, _STAND_INS)
    advice = {key: f"it is LMCache's, here it is {supported.key}" for key, supported in SUPPORTED.items()}
    problems += explain(errors, known_keys(EngineConfig), origins, _DEFAULTS, advice)
    origin = origins.get(("tiers",), _DEFAULTS)
    if not errors and config is not None:
        tiers: list[TierSpec | None] = list(config.tiers)
    else:
        tiers = _usable_tiers(content.get("tiers"))
    placed = [
        tier.placed(origin.within(("tiers", index), f"tiers[{index}] ({tier.id})"))
        for index, tier in enumerate(tiers)
        if tier is not None
    ]
    return (config or _NOTHING).model_copy(update={"tiers": tuple(placed)}), origins


def _usable_tiers(value: object) -> list[TierSpec | None]:
    """The tiers of a list with mistakes, each with its valid values; None for an invalid one."""
    try:
        items = parse_list(value)
    except ValueError:
        return []
    return [validate_all(TierSpec, item)[0] for item in items]


def _config_file(path: Path | None, env: Mapping[str, str], from_extra: object) -> tuple[Path | None, str]:
    """The file to read, and the option or variable that names it."""
    if path is not None:
        return path, ""
    if from_extra is not None:
        if not isinstance(from_extra, str | os.PathLike) or not os.fspath(from_extra):
            raise ConfigError(f"{EXTRA}: config_file is {from_extra!r}: expected the path of a YAML file")
        return Path(os.fspath(from_extra)), f"{EXTRA}: config_file"
    for name in (PREFIX + CONFIG_FILE, LMCACHE_FILE):
        if file := env.get(name, "").strip():
            return Path(file), name
    return None, ""


def _replaced_tiers(own: Iterable[Setting], translated: Iterable[Setting]) -> list[str]:
    """A note if settings of LMCache replace the tiers of our file."""
    tiers = ("tiers",)
    theirs = next((setting for setting in translated if setting.path == tiers), None)
    return [
        f"{setting.origin.at(tiers)}: tiers: {theirs.origin.name} takes precedence over the file"
        for setting in own
        if setting.path == tiers and theirs is not None
    ]


def _tier_names() -> Collection[str]:
    return entry_points(group="lmcache_async.tiers").names
