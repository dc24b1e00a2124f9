"""Sources of settings: the YAML file, mappings and environment variables, merged by precedence.

Variables are read by pydantic-settings. Its YAML source is not used, because it has neither the line of a key nor
limits of size, depth and aliases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from lmcache_async.config.files import MAX_YAML_BYTES, YAMLTextError, read_bounded, read_yaml
from lmcache_async.config.model import EngineConfig
from lmcache_async.config.secrets import SECRET_PATHS
from lmcache_async.config.validation import KeyPath, Origin, show, spell_path
from lmcache_async.config.values import parse_mapping, unless_none
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from pydantic.fields import FieldInfo

PREFIX = "LMCACHE_ASYNC_"
CONFIG_FILE = "CONFIG_FILE"
TOKEN = "TOKEN"
"""Token of the status page for `lmcache-async top`; not a setting of an engine."""
_MAX_LINE_DEPTH = 6  # of keys such as tiers[0].layers[0].options.get.drop
_SERVICE_LINKS = re.compile(
    r"(?:_|^)(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?)$"
)


class Rank(IntEnum):
    """Precedence of a source; the highest wins."""

    FILE = 0
    LMCACHE = 1
    VARIABLE = 2
    EXTRA = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key, not validated."""

    path: KeyPath
    value: Any
    origin: Origin
    rank: Rank

    @property
    def key(self) -> str:
        return spell_path(self.path)

    @property
    def where(self) -> str:
        return self.origin.at(self.path)

    def parsed(self, parse: Callable[[object], Any]) -> Any:
        """Parse the value.

        Raises:
            ConfigError: The value is invalid.
        """
        try:
            return parse(self.value)
        except ValueError as error:
            raise ConfigError(f"{self.where}: {self.key} is {show(self.value, self.key)}: {error}") from None


def mapping_settings(
    content: Mapping[Any, Any], origin: Origin, rank: Rank, problems: list[str]
) -> list[Setting]:
    """Return the settings of a nested mapping, in which dotted keys are keys of sections.

    Args:
        content: The mapping.
        origin: Its origin.
        rank: Its precedence.
        problems: Receives a message for each key that is set twice or cannot be used.
    """
    settings: dict[KeyPath, Setting] = {}
    for path, value in _leaves(EngineConfig, (), content, lambda _: origin, problems):
        if path in settings:
            problems.append(f"{origin.at(path)}: {spell_path(path)} is given twice")
        settings[path] = Setting(path, value, origin, rank)
    return list(settings.values())


def variable_settings(env: Mapping[str, str], problems: list[str]) -> list[Setting]:
    """Return the settings of the `LMCACHE_ASYNC_*` variables. Empty variables are ignored."""
    names = {
        name.lower(): name
        for name, value in sorted(env.items())
        if name.startswith(PREFIX)
        and name not in {PREFIX + CONFIG_FILE, PREFIX + TOKEN}
        and value.strip()
        and not is_service_link(name.removeprefix(PREFIX), value)
    }

    def origin_of(path: KeyPath) -> Origin:
        """The variable of the key, or of the section around it."""
        parts = [str(part).replace(".", "__").lower() for part in path]
        for length in range(len(parts), 0, -1):
            if name := names.get(PREFIX.lower() + "__".join(parts[:length])):
                return Origin(name, variable_prefix=PREFIX)
        return Origin("environment", variable_prefix=PREFIX)

    content = _Variables({name: env[names[name]] for name in names})()
    return [
        Setting(path, value, origin_of(path), Rank.VARIABLE)
        for path, value in _leaves(EngineConfig, (), content, origin_of, problems)
    ]


def refuse_secrets(settings: Iterable[Setting], problems: list[str]) -> list[Setting]:
    """Return the settings without secrets that are not in a variable, where others may read them."""
    kept: list[Setting] = []
    for setting in settings:
        file = SECRET_PATHS.get(tuple(map(str, setting.path)))
        given = unless_none(setting.value) is not None
        if file is None or not given or setting.rank is Rank.VARIABLE:
            kept.append(setting)
        else:
            problems.append(
                f"{setting.where}: {setting.key} is a secret and not allowed there: name its file with {file}, or set"
                f" {PREFIX}{setting.key.upper().replace('.', '__')}"
            )
    return kept


def merge(settings: Iterable[Setting]) -> tuple[dict[str, Any], dict[KeyPath, Origin]]:
    """Merge settings by precedence; of equal precedence the later one wins.

    Returns:
        The nested content, and the origin of each key.
    """
    content: dict[str, Any] = {}
    origins: dict[KeyPath, Origin] = {}
    for setting in sorted(settings, key=lambda setting: setting.rank):
        section = content
        for part in setting.path[:-1]:
            section = section.setdefault(str(part), {})
        section[str(setting.path[-1])] = setting.value
        origins[setting.path] = setting.origin
    return content, origins


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set the variable for a service whose name begins like our prefix."""
    return bool(_SERVICE_LINKS.search(name)) or (name.endswith("PORT") and "://" in value)


def read_file(path: Path, problems: list[str], named_by: str = "") -> tuple[dict[str, Any], Origin]:
    """Read a YAML file; return its content and its origin with the line of each key.

    Args:
        path: The file.
        problems: Receives a message for each key that is set twice; the last one counts.
        named_by: The option or variable that names the file, for messages.

    Raises:
        ConfigError: The file cannot be read, or is not a YAML mapping.
    """
    by = f"{named_by}: " if named_by else ""
    try:
        text = read_bounded(path, MAX_YAML_BYTES)[0].decode("utf-8")
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
    if node is not None:
        _number_lines(path, node, (), lines, problems)
    return {str(key): value for key, value in content.items()}, Origin(str(path), lines)


class _VariableNames(EngineConfig, BaseSettings):
    """The keys of the configuration with the names of their variables."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", defer_build=True)


class _Variables(EnvSettingsSource):
    """Nested content of variables.

    Unlike in the base class, texts of lists are not decoded here, and variables of unknown keys are kept,
    so that validation reports them.

    Args:
        variables: Variables by their names in lower case.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(_VariableNames)
        self.env_vars = variables

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if _section_of(field) is not None:
            try:
                return parse_mapping(value)
            except ValueError:
                pass  # reported by `_leaves`
        return value

    def __call__(self) -> dict[str, Any]:
        content = super().__call__()
        for name, value in self.env_vars.items():
            key, *rest = name.removeprefix(PREFIX.lower()).split("__")
            field = EngineConfig.model_fields.get(key)
            if field is None or (rest and _section_of(field) is None):
                content[".".join((key, *rest))] = value
        return content


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _leaves(
    model: type[BaseModel],
    above: KeyPath,
    content: Mapping[Any, Any],
    origin_of: Callable[[KeyPath], Origin],
    problems: list[str],
) -> Iterator[tuple[KeyPath, Any]]:
    """The path and the value of each key. Unknown keys are among them."""
    for raw_key, value in content.items():
        key, _, rest = str(raw_key).partition(".")
        path = (*above, key)
        field = model.model_fields.get(key)
        section = _section_of(field) if field is not None else None
        if field is None:
            yield (*above, str(raw_key)), value
        elif section is None and rest:
            problems.append(
                f"{origin_of(path).at(path)}: {spell_path(path)} is not a section, so it has no key {rest}"
            )
        elif section is None:
            yield path, value
        elif rest:
            yield from _leaves(section, path, {rest: value}, origin_of, problems)
        elif value is not None:  # an empty section of a file
            try:
                inner = parse_mapping(value)
            except ValueError as error:
                name = spell_path(path)
                problems.append(f"{origin_of(path).at(path)}: {name} is {show(value, name)}: {error}")
            else:
                yield from _leaves(section, path, inner, origin_of, problems)


def _number_lines(
    file: Path, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[str]
) -> None:
    """Record the line of each key, and report keys that are set twice, of which YAML keeps the last."""
    if len(path) > _MAX_LINE_DEPTH:
        return
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            inner = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if inner in lines and inner[-1] != "<<":
                problems.append(
                    f"{file}, line {line}: {spell_path(inner)} is given twice, first on line {lines[inner]}"
                )
            lines[inner] = line
            _number_lines(file, value_node, inner, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _number_lines(file, item, (*path, index), lines, problems)
