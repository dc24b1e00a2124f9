"""One typed config out of a mapping, the environment and a file, in this order of precedence."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmcache_async.config.explain import KeyPath, Origin, explain, known_keys
from lmcache_async.config.lmcache import (
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
    Rank,
    Setting,
    read_file,
    read_variables,
    refuse_secrets,
    settings_of,
)
from lmcache_async.config.specs import TierSpec
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

logger = logging.getLogger(__name__)

EXTRA = "kv_connector_extra_config"
LMCACHE_FILE = VARIABLE_PREFIX + CONFIG_FILE
_DEFAULTS = Origin("defaults")


def load_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> EngineConfig:
    """The config from, first wins: `extra`, LMCACHE_ASYNC_* variables, LMCache's own LMCACHE_*, the file, defaults.

    Args:
        path: The YAML file; else `extra["config_file"]`, LMCACHE_ASYNC_CONFIG_FILE or LMCACHE_CONFIG_FILE name it.
        env: The environment; None is the process's own.
        extra: vLLM's kv_connector_extra_config: nested, or with dotted keys such as `arena.max_bytes`.

    Raises:
        ConfigError: Keys or values are wrong; a line for each.
    """
    loaded = read_config(path, env, extra)
    if loaded.notes:
        logger.warning("Of LMCache's settings these have no effect:\n  %s", "\n  ".join(loaded.notes))
    return loaded.config


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config that knows where it came from.

    Attributes:
        config: The config.
        origins: Of each key that was given; the rest are defaults.
        notes: A line for each of LMCache's settings that has no effect.
    """

    config: EngineConfig
    origins: Mapping[KeyPath, Origin]
    notes: tuple[str, ...] = ()

    def source_of(self, path: KeyPath) -> str | None:
        """Where the value came from, with the line in a file; None for a default."""
        for length in range(len(path), 0, -1):
            if origin := self.origins.get(path[:length]):
                return origin.at(path)
        return None


def read_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """As `load_config`, with the places that values came from, and silently.

    Raises:
        ConfigError: Keys or values are wrong; a line for each.
    """
    env = os.environ if env is None else env
    ours, theirs = split_extra(extra or {})
    file, named_by = _config_file(path, env, ours.pop("config_file", None))
    is_lmcaches = named_by == LMCACHE_FILE
    found = found_in_mapping(theirs, Origin(EXTRA), Rank.EXTRA) + found_in_variables(env)
    settings: list[Setting] = []
    problems: list[str] = []
    if file is not None:
        content, origin = read_file(file, named_by)
        if is_lmcaches or looks_like_lmcache(content):
            found += found_in_mapping(content, origin, Rank.FILE)
        else:
            settings += settings_of(content, origin, Rank.FILE, problems)
    translated, notes = translate(found, _tier_names, problems)
    notes += _replaced_tiers(settings, translated)
    settings += translated + read_variables(env, problems)
    settings += settings_of(ours, Origin(EXTRA), Rank.EXTRA, problems)
    config, origins = _build(refuse_secrets(settings, problems), problems)
    if config is None or problems:
        raise ConfigError("\n".join(problems))
    if lmcache_file := env.get(LMCACHE_FILE, "").strip():
        notes += [] if is_lmcaches else [f"{LMCACHE_FILE}: {lmcache_file} is not read, {file} is"]
    return LoadedConfig(config, origins, tuple(notes))


def _build(
    settings: Iterable[Setting], problems: list[str]
) -> tuple[EngineConfig | None, Mapping[KeyPath, Origin]]:
    """The config from settings; for one key the highest rank wins, of equal ones the later."""
    content: dict[str, Any] = {}
    origins: dict[KeyPath, Origin] = {}
    for setting in sorted(settings, key=lambda setting: setting.rank):
        section = content
        for part in setting.path[:-1]:
            section = section.setdefault(part, {})
        section[setting.path[-1]] = setting.value
        origins[setting.path] = setting.origin
    try:
        config = EngineConfig.model_validate(content)
    except ValidationError as error:
        problems.append(str(explain(error, known_keys(EngineConfig), origins, _DEFAULTS)))
        return None, origins
    tiers = tuple(_placed(config.tiers, origins.get(("tiers",), _DEFAULTS)))
    return config.model_copy(update={"tiers": tiers}), origins


def _placed(tiers: Iterable[TierSpec], origin: Origin) -> Iterable[TierSpec]:
    for index, tier in enumerate(tiers):
        path = ("tiers", index)
        yield tier.placed(f"{origin.at(path)}: tiers[{index}] ({tier.id})")


def _config_file(path: Path | None, env: Mapping[str, str], from_extra: object) -> tuple[Path | None, str]:
    """The file to read, and who names it."""
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
    """A note where LMCache's settings take the place of the tiers that our file names."""
    tiers = ("tiers",)
    theirs = next((setting for setting in translated if setting.path == tiers), None)
    return [
        f"{setting.origin.at(tiers)}: tiers: {theirs.origin.name} comes before the file"
        for setting in own
        if setting.path == tiers and theirs is not None
    ]


def _tier_names() -> Collection[str]:
    return entry_points(group="lmcache_async.tiers").names
