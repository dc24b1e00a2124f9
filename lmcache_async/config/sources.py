"""Sources of settings: the YAML file, mappings and environment variables, merged by precedence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lmcache_async.config.files import MAX_YAML_BYTES, YAMLTextError, read_bounded, read_yaml
from lmcache_async.config.model import EngineConfig
from lmcache_async.config.secrets import SECRET_PATHS
from lmcache_async.config.validation import KeyPath, Origin, show, spell_path
from lmcache_async.config.values import parse_mapping, unless_none
from lmcache_async.errors import ConfigError

PREFIX = "LMCACHE_ASYNC_"
CONFIG_FILE = "CONFIG_FILE"
TOKEN = "TOKEN"
"""Token of the status page for `lmcache-async top`; not a setting of an engine."""
SECTIONS = {
    name: info.annotation
    for name, info in EngineConfig.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
}
_SERVICE_LINKS = re.compile(
    r"(?:_|^)(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?)$"
)


class Precedence(IntEnum):
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
    place: str
    precedence: Precedence

    @property
    def key(self) -> str:
        return spell_path(self.path)

    def parsed(self, parse: Callable[[object], Any]) -> Any:
        """Parse the value."""
        try:
            return parse(self.value)
        except ValueError as error:
            raise ConfigError(f"{self.place}: {self.key} is {show(self.value, self.key)}: {error}") from None


def mapping_settings(
    content: Mapping[Any, Any],
    place_of: Callable[[KeyPath], str],
    precedence: Precedence,
    problems: list[str],
) -> Iterator[Setting]:
    """Yield the settings of a nested mapping, including those of unknown keys. Dotted keys are keys of sections.

    Keys that are set twice or cannot be used are added to `problems`.
    """
    seen: set[KeyPath] = set()
    for raw_key, value in content.items():
        written: KeyPath = (str(raw_key),)
        head, _, rest = str(raw_key).partition(".")
        values: dict[KeyPath, Any] = {written: value}
        if head in SECTIONS and rest:
            values = {(head, rest): value}
        elif head in SECTIONS:
            try:
                inner = {} if value is None else parse_mapping(value)  # None: an empty section of a file
            except ValueError as error:
                problems.append(f"{place_of(written)}: {head} is {show(value, head)}: {error}")
                continue
            values = {(head, key): one for key, one in inner.items()}
        elif head in EngineConfig.model_fields and rest:
            problems.append(f"{place_of((head, rest))}: {head} is not a section, so it has no key {rest}")
            continue
        for path, one in values.items():
            place = place_of(written if rest else path)
            if path in seen:
                problems.append(f"{place}: {spell_path(path)} is given twice")
            seen.add(path)
            yield Setting(path, one, place, precedence)


def variable_settings(env: Mapping[str, str], problems: list[str]) -> Iterator[Setting]:
    """Yield the settings of the `LMCACHE_ASYNC_*` variables. Empty variables are ignored."""
    for name, value in sorted(env.items()):
        key = name.removeprefix(PREFIX)
        is_ours = name.startswith(PREFIX) and key not in {CONFIG_FILE, TOKEN}
        if is_ours and value.strip() and not is_service_link(key, value):
            content = {key.lower().replace("__", "."): value}
            yield from mapping_settings(content, Origin(name).place, Precedence.VARIABLE, problems)


def refuse_secrets(settings: Iterable[Setting], problems: list[str]) -> Iterator[Setting]:
    """Yield the settings, except secrets that others may read: those not set by a variable. They become `problems`."""
    for setting in settings:
        file = SECRET_PATHS.get(setting.path)
        if file is None or unless_none(setting.value) is None or setting.precedence is Precedence.VARIABLE:
            yield setting
        else:
            problems.append(
                f"{setting.place}: {setting.key} is a secret and not allowed there: name its file with {file}, or set"
                f" {PREFIX}{setting.key.upper().replace('.', '__')}"
            )


def merge(settings: Iterable[Setting], file: Origin) -> tuple[dict[str, Any], Origin]:
    """Merge settings by precedence; of equal precedence the later one wins. Return the content and its origin.

    The lines of keys inside values, such as those of tiers, are taken from `file`.
    """
    content: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    for setting in sorted(settings, key=lambda setting: setting.precedence):
        section = content.setdefault(str(setting.path[0]), {}) if len(setting.path) > 1 else content
        section[str(setting.path[-1])] = setting.value
        places[setting.path] = setting.place
    inner = {path: place for path, place in file.places.items() if len(path) > 1 and path[0] not in SECTIONS}
    from_file = {path: place for path, place in inner.items() if places.get(path[:1]) == file.place(path[:1])}
    return content, Origin("defaults", places | from_file)


def is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes set the variable, for a service whose name begins like the prefix."""
    return bool(_SERVICE_LINKS.search(name)) or (name.endswith("PORT") and "://" in value)


def read_file(path: Path, problems: list[str], named_by: str = "") -> tuple[dict[str, Any], Origin]:
    """Read a YAML file; return its content and its origin with the line of each key.

    Keys that are set twice are added to `problems`; the last value counts. `named_by` is the option or variable that
    names the file, for messages.
    """
    try:
        content, lines = read_yaml(read_bounded(path, MAX_YAML_BYTES)[0].decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        by = f"{named_by}: " if named_by else ""
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{by}the config file {path} cannot be read: {why}") from None
    except YAMLTextError as error:
        where = f"{path}, line {error.line}" if error.line else str(path)
        raise ConfigError(f"{where}: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {show(content)}")
    for key, line, first in lines.repeated:
        problems.append(f"{path}, line {line}: {spell_path(key)} is given twice, first on line {first}")
    places = {key: f"{path}, line {line}" for key, line in lines.lines.items()}
    return {str(key): value for key, value in (content or {}).items()}, Origin(str(path), places)
