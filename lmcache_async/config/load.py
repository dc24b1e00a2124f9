"""One typed config out of a mapping, the environment and a file, in this order of precedence."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.config.explain import KeyPath, Origin, explain, known_keys, validate_all
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
from lmcache_async.config.values import parse_list
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

logger = logging.getLogger(__name__)

EXTRA = "kv_connector_extra_config"
LMCACHE_FILE = VARIABLE_PREFIX + CONFIG_FILE
_DEFAULTS = Origin("defaults")
_STAND_INS: Mapping[KeyPath, object] = {
    ("hash_algorithm",): "sha256"
}  # where it is wrong: an algorithm that a hash key is right with
_NOTHING = EngineConfig().model_copy(update={"tiers": ()})


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
    return read_config(path, env, extra).announced()


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config that knows where it came from.

    Attributes:
        config: The config; where there are problems, what is right of it.
        origins: Of each key that was given; the rest are defaults.
        notes: A line for each of LMCache's settings that has no effect.
        problems: A line for each mistake.
    """

    config: EngineConfig
    origins: Mapping[KeyPath, Origin]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def announced(self) -> EngineConfig:
        """The config, after a warning about settings without effect."""
        if self.notes:
            logger.warning("Of LMCache's settings these have no effect:\n  %s", "\n  ".join(self.notes))
        return self.config

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
    loaded = survey_config(path, env, extra)
    if loaded.problems:
        raise ConfigError("\n".join(loaded.problems))
    return loaded


def survey_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """As `read_config`, but mistakes are in the result, so that the caller can look for more of them.

    The config then has the values and tiers that are right, and nothing at all of a file that cannot be read.
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
    is_lmcaches = named_by == LMCACHE_FILE
    found = found_in_mapping(theirs, Origin(EXTRA), Rank.EXTRA) + found_in_variables(env)
    if is_lmcaches or looks_like_lmcache(content):
        found += found_in_mapping(content, origin, Rank.FILE)
    else:
        settings += settings_of(content, origin, Rank.FILE, problems)
    translated, notes = translate(found, _tier_names, problems)
    notes += _replaced_tiers(settings, translated)
    settings += translated + read_variables(env, problems)
    settings += settings_of(ours, Origin(EXTRA), Rank.EXTRA, problems)
    config, origins = _build(refuse_secrets(settings, problems), problems)
    if lmcache_file := env.get(LMCACHE_FILE, "").strip():
        notes += [] if is_lmcaches else [f"{LMCACHE_FILE}: {lmcache_file} is not read, {file} is"]
    return LoadedConfig(config, origins, tuple(notes), tuple(problems))


def _build(settings: Iterable[Setting], problems: list[str]) -> tuple[EngineConfig, Mapping[KeyPath, Origin]]:
    """The config from settings; for one key the highest rank wins, of equal ones the later.

    Of what is wrong it has nothing, and the lines about it are added to `problems`.
    """
    content: dict[str, Any] = {}
    origins: dict[KeyPath, Origin] = {}
    for setting in sorted(settings, key=lambda setting: setting.rank):
        section = content
        for part in setting.path[:-1]:
            section = section.setdefault(part, {})
        section[setting.path[-1]] = setting.value
        origins[setting.path] = setting.origin
    config, errors = validate_all(EngineConfig, content, _STAND_INS)
    problems += explain(errors, known_keys(EngineConfig), origins, _DEFAULTS)
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
    """What is right of each tier of a list with mistakes; None in the place of one that cannot be made."""
    try:
        items = parse_list(value)
    except ValueError:
        return []
    return [validate_all(TierSpec, item)[0] for item in items]


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
