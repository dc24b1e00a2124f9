"""From a YAML file, a mapping or environment variables to settings that know where they came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from lmcache_async.config.explain import KeyPath, Origin, known_keys, show, spell_path, unknown_key
from lmcache_async.config.files import read_bounded
from lmcache_async.config.lmcache_keys import RENAMED
from lmcache_async.config.model import EngineConfig
from lmcache_async.config.secrets import SECRET_PATHS
from lmcache_async.config.values import parse_mapping, unless_none
from lmcache_async.config.yaml_text import MAX_BYTES, YAMLTextError, read_yaml
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

PREFIX = "LMCACHE_ASYNC_"
CONFIG_FILE = "CONFIG_FILE"
TOKEN = "TOKEN"
"""Of the status page, for `lmcache-async top`: no setting of an engine."""
_SERVICE_LINKS = re.compile(
    r"(?:_|^)(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?)$"
)


class Rank(IntEnum):
    """Who wins: the highest."""

    FILE = 0
    LMCACHE = 1
    VARIABLE = 2
    EXTRA = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """One value for one key, not yet checked."""

    path: tuple[str, ...]
    value: Any
    origin: Origin
    rank: Rank


def settings_of(content: Mapping[Any, Any], origin: Origin, rank: Rank, problems: list[str]) -> list[Setting]:
    """The settings of a nested mapping; dotted keys are keys of a section.

    A key that is unknown or given twice is a problem, and the others count all the same.
    """
    settings: dict[tuple[str, ...], Setting] = {}
    for setting in _walk(EngineConfig, (), content, origin, rank, problems):
        if setting.path in settings:
            problems.append(f"{origin.at(setting.path)}: {spell_path(setting.path)} is given twice")
        settings[setting.path] = setting
    return list(settings.values())


def read_variables(env: Mapping[str, str], problems: list[str]) -> list[Setting]:
    """The settings of the `LMCACHE_ASYNC_*` variables; an empty variable is one that is not set."""
    settings: list[Setting] = []
    for name in sorted(env):
        key = name.removeprefix(PREFIX)
        if key in {name, CONFIG_FILE, TOKEN} or not env[name].strip() or is_service_link(key, env[name]):
            continue
        content = {key.lower().replace("__", "."): env[name]}
        settings += settings_of(content, Origin(name, variable_prefix=PREFIX), Rank.VARIABLE, problems)
    return settings


def refuse_secrets(settings: Iterable[Setting], problems: list[str]) -> list[Setting]:
    """Those that may stay: a secret comes from a file of its own or from a variable, which others cannot read."""
    kept: list[Setting] = []
    for setting in settings:
        file = SECRET_PATHS.get(setting.path)
        given = unless_none(setting.value) is not None
        if file is None or not given or setting.rank is Rank.VARIABLE:
            kept.append(setting)
        else:
            key = spell_path(setting.path)
            problems.append(
                f"{setting.origin.at(setting.path)}: {key} is a secret, which has no place there: name its file with"
                f" {file}, or set {PREFIX}{key.upper().replace('.', '__')}"
            )
    return kept


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes made the variable for a service whose name looks like our prefix."""
    return bool(_SERVICE_LINKS.search(name)) or (name.endswith("PORT") and "://" in value)


def read_file(path: Path, problems: list[str], named_by: str = "") -> tuple[dict[str, Any], Origin]:
    """The YAML file's top mapping, and its origin with the line of each key.

    Args:
        path: The file.
        problems: Gets a line for each key that is given twice; the last one counts.
        named_by: The option or variable that names the file.

    Raises:
        ConfigError: It cannot be read, is not YAML or no mapping.
    """
    by = f"{named_by}: " if named_by else ""
    try:
        text = read_bounded(path, MAX_BYTES)[0].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{by}the config file {path} cannot be read: {why}") from None
    try:
        content, node = read_yaml(text)
    except YAMLTextError as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        raise ConfigError(f"{where}: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {show(content)}")
    lines: dict[KeyPath, int] = {}
    if isinstance(node, yaml.MappingNode):
        _number_lines(path, node, (), lines, problems)
    return {str(key): value for key, value in content.items()}, Origin(str(path), lines)


def _walk(
    model: type[BaseModel],
    above: tuple[str, ...],
    content: Mapping[Any, Any],
    origin: Origin,
    rank: Rank,
    problems: list[str],
) -> Iterator[Setting]:
    for raw_key, value in content.items():
        key, _, rest = str(raw_key).partition(".")
        path = (*above, key)
        if key not in model.model_fields:
            problems.append(
                f"{origin.at(path)}: there is no key {spell_path(path)};"
                f" it is LMCache's, here it is {RENAMED[key]}"
                if path[0] in RENAMED
                else unknown_key(origin, path, known_keys(EngineConfig))
            )
            continue
        section = model.model_fields[key].annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            if rest:
                problems.append(
                    f"{origin.at(path)}: {spell_path(path)} has no keys of its own, such as {rest};"
                    " it is given as a whole"
                )
                continue
            yield Setting(path, value, origin, rank)
        elif rest:
            yield from _walk(section, path, {rest: value}, origin, rank, problems)
        elif value is not None:  # a section with nothing under it
            inner = _section(path, value, origin, problems)
            yield from _walk(section, path, inner, origin, rank, problems)


def _section(path: tuple[str, ...], value: object, origin: Origin, problems: list[str]) -> Mapping[str, Any]:
    try:
        return parse_mapping(value)
    except ValueError as error:
        problems.append(f"{origin.at(path)}: {spell_path(path)} is {show(value, spell_path(path))}: {error}")
        return {}


def _number_lines(
    file: Path, node: yaml.MappingNode, above: KeyPath, lines: dict[KeyPath, int], problems: list[str]
) -> None:
    """Fill in the line of each key; a key that is there twice is a problem, YAML's reader keeps the last."""
    for key_node, value_node in node.value:
        key = str(key_node.value)
        path = (*above, key)
        line = key_node.start_mark.line + 1
        if path in lines and key != "<<":
            problems.append(
                f"{file}, line {line}: {spell_path(path)} is given twice, first on line {lines[path]}"
            )
        lines[path] = line
        _number_value(file, value_node, path, lines, problems)


def _number_value(
    file: Path, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[str]
) -> None:
    if len(path) > 6:  # deeper than any key of ours, such as tiers[0].layers[0].options.get.drop
        return
    if isinstance(node, yaml.MappingNode):
        _number_lines(file, node, path, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _number_value(file, item, (*path, index), lines, problems)
