"""LMCache's own settings, so that its users can keep their file and their variables.

What has a meaning here becomes a setting of ours. What has none is named with the reason, unless it
only turns off what is not there. What LMCache does not know either is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.config.explain import KeyPath, Origin, hint, nearest, show
from lmcache_async.config.lmcache_keys import (
    ALIASES,
    CONNECTOR_KEYS,
    DEFAULTS,
    REMOTE_TIERS,
    RENAMED,
    WHY_NOT,
    WHY_NOT_PREFIXES,
    WHY_NOT_VARIABLES,
)
from lmcache_async.config.model import EngineConfig
from lmcache_async.config.sources import CONFIG_FILE, PREFIX, Rank, Setting, is_service_link
from lmcache_async.config.values import (
    parse_count,
    parse_flag,
    parse_mapping,
    parse_number,
    parse_seconds,
    unless_none,
)
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

VARIABLE_PREFIX = "LMCACHE_"
EXTRA_PREFIX = "lmcache."
_OFF = frozenset({"", "none", "null", "false", "no", "off", "0", "0.0", "[]", "{}"})


@dataclass(frozen=True, slots=True)
class Found:
    """One of LMCache's settings as it was found, under the name that LMCache gives it today."""

    key: str
    value: Any
    origin: Origin
    rank: Rank

    @property
    def where(self) -> str:
        return self.origin.at((self.key,))

    def parsed(self, parse: Callable[[object], Any]) -> Any:
        try:
            return parse(self.value)
        except ValueError as error:
            raise ConfigError(f"{self.where}: {self.key} is {show(self.value, self.key)}: {error}") from None


def looks_like_lmcache(content: Mapping[str, Any]) -> bool:
    """Whether a config file is LMCache's: most of its keys are LMCache's and not ours."""
    ours = sum(key in EngineConfig.model_fields and key not in RENAMED for key in content)
    theirs = sum(key not in EngineConfig.model_fields and _is_known(_modern(key)) for key in content)
    return theirs > ours


def found_in_mapping(content: Mapping[str, Any], origin: Origin, rank: Rank) -> list[Found]:
    return [Found(_modern(key), value, _renamed(origin, key), rank) for key, value in content.items()]


def found_in_variables(env: Mapping[str, str]) -> list[Found]:
    """The `LMCACHE_*` variables that are not ours; an empty variable is one that is not set."""
    found: list[Found] = []
    for name in sorted(env):
        key = name.removeprefix(VARIABLE_PREFIX).lower()
        value = _unquoted(env[name].strip())
        if not name.startswith(VARIABLE_PREFIX) or name.startswith(PREFIX) or key == CONFIG_FILE.lower():
            continue
        if value and not is_service_link(name, value):
            found.append(
                Found(_modern(key), value, Origin(name, variable_prefix=VARIABLE_PREFIX), Rank.LMCACHE)
            )
    return found


def split_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """kv_connector_extra_config as ours and LMCache's, the latter without the prefix `lmcache.`."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in ((str(key), value) for key, value in extra.items()):
        if key.startswith(EXTRA_PREFIX):
            theirs[key.removeprefix(EXTRA_PREFIX)] = value
        elif key in CONNECTOR_KEYS:
            theirs[key] = value
        else:
            ours[key] = value
    return ours, theirs


def translate(
    found: Iterable[Found], tier_names: Callable[[], Collection[str]], problems: list[str]
) -> tuple[list[Setting], list[str]]:
    """Settings of ours, and a note for each of LMCache's settings that has no effect.

    Args:
        found: LMCache's settings; of two for one key that of the higher rank counts.
        tier_names: Gives the names of the installed tiers; asked only for a `remote_url`.
        problems: Gets what is wrong: a setting that is unknown to LMCache too, or a value.
    """
    chosen = {item.key: item for item in sorted(found, key=lambda item: item.rank)}
    settings: list[Setting] = []
    notes: list[str] = []
    for item in chosen.values():
        try:
            settings += _translated(item, chosen, notes)
        except ConfigError as error:
            problems.append(str(error))
    try:
        settings += _tiers(chosen, tier_names, notes)
    except ConfigError as error:
        if str(error) not in problems:
            problems.append(str(error))
    return settings, notes


def _translated(item: Found, chosen: Mapping[str, Found], notes: list[str]) -> list[Setting]:
    """The setting that it is by itself; the tiers are made of several."""
    if item.key in _PLAIN:
        if unless_none(item.value) is not None and not _is_staging_only(item, chosen, notes):
            value = item.parsed(_PLAIN[item.key])
            path = tuple(RENAMED[item.key].split("."))
            line = item.origin.lines.get((item.key,))
            lines: dict[KeyPath, int] = {} if line is None else {path: line}
            origin = Origin(item.origin.name, lines, item.origin.variable_prefix)
            return [Setting(path, value, origin, item.rank)]
    elif item.key == "extra_config":
        options = item.parsed(parse_mapping) if unless_none(item.value) is not None else {}
        notes += [f"{item.where}: extra_config.{key}: it is for LMCache's own backends" for key in options]
    elif item.key not in RENAMED:
        notes += _notes_of(item)
    return []


def _gibibytes(value: object) -> int:
    """LMCache's `GB` are 1024 ** 3 bytes."""
    try:
        gibibytes = parse_number(value)
    except ValueError:
        gibibytes = 0.0
    if int(gibibytes * 1024**3) < 1:
        raise ValueError("expected a number of GiB above 0")
    return int(gibibytes * 1024**3)


def _milliseconds(value: object) -> float:
    try:
        return parse_seconds(value) / 1000
    except ValueError:
        raise ValueError("expected a number of milliseconds above 0") from None


_PLAIN: Mapping[str, Callable[[object], Any]] = {
    "chunk_size": parse_count,
    "max_local_cpu_size": _gibibytes,
    "local_cpu_use_hugepages": parse_flag,
    "save_decode_cache": parse_flag,
    "save_unfull_chunk": parse_flag,
    "discard_partial_chunks": lambda value: not parse_flag(value),
    "blocking_timeout_secs": parse_seconds,
    "lookup_timeout_ms": _milliseconds,
    "pin_timeout_sec": parse_seconds,
}


def _tiers(
    chosen: Mapping[str, Found], tier_names: Callable[[], Collection[str]], notes: list[str]
) -> list[Setting]:
    """The one setting of `tiers` that LMCache's cpu, disk and remote come to; none where none is set."""
    used = [chosen[key] for key in ("local_cpu", "local_disk", "remote_url") if key in chosen]
    size = chosen.get("max_local_disk_size")
    tiers: list[Any] = ["cpu"] if _has_cpu(chosen) else []
    disk = chosen.get("local_disk")
    path = disk.parsed(_disk_path) if disk else None
    if disk and path is not None:
        tiers.append({"name": "disk", "path": path, "max_bytes": _disk_size(disk, size)})
        used += [size] if size else []
    elif size and not _asks_nothing(size):
        notes.append(f"{size.where}: max_local_disk_size: there is no local_disk")
    remote = chosen.get("remote_url")
    if remote and (url := unless_none(remote.value)) is not None:
        scheme = remote.parsed(_url_scheme)
        names = list(dict.fromkeys((scheme, REMOTE_TIERS.get(scheme, scheme))))
        if name := next((name for name in names if name in tier_names()), None):
            tiers.append({"name": name, "url": url})
        else:
            notes.append(
                f"{remote.where}: remote_url: {scheme}:// needs a tier plug-in named {' or '.join(names)};"
                " none is installed and this version brings none"
            )
    if not used:
        return []
    last = max(used, key=lambda item: item.rank)
    if not tiers:
        raise ConfigError(
            f"{last.where}: {last.key} is {show(last.value)}: no tier is left:"
            " expected local_cpu on, a local_disk, or a remote_url whose tier is installed"
        )
    where = " and ".join(dict.fromkeys(item.origin.name for item in used))
    return [Setting(("tiers",), tiers, Origin(where), last.rank)]


def _has_cpu(chosen: Mapping[str, Found]) -> bool:
    local_cpu = chosen.get("local_cpu")
    return local_cpu is None or unless_none(local_cpu.value) is None or bool(local_cpu.parsed(parse_flag))


def _is_staging_only(item: Found, chosen: Mapping[str, Found], notes: list[str]) -> bool:
    """Whether it is `max_local_cpu_size: 0` beside `local_cpu: false`; we still need an arena to pass through."""
    if item.key != "max_local_cpu_size" or _has_cpu(chosen) or not _asks_nothing(item):
        return False
    notes.append(
        f"{item.where}: max_local_cpu_size: the other tiers pass through the arena, see arena.max_bytes"
    )
    return True


def _disk_path(value: object) -> str | None:
    value = unless_none(value)
    if (
        value is None
        or value is False
        or (isinstance(value, str) and value.strip().lower() in {"false", "off", "no"})
    ):
        return None
    if not isinstance(value, str) or "," in value:
        raise ValueError("expected one path, plain or as file://; name several disk tiers under tiers")
    return value.strip()


def _disk_size(disk: Found, size: Found | None) -> int:
    if size is None or _asks_nothing(size):
        raise ConfigError(
            f"{disk.where}: local_disk is {show(disk.value)}: expected max_local_disk_size beside it,"
            " a number of GiB above 0 (without it LMCache never uses the disk)"
        )
    return int(size.parsed(_gibibytes))


def _url_scheme(value: object) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a URL, such as redis://host:6379")
    return match[1].lower()


def _notes_of(item: Found) -> list[str]:
    why = _why_not(item.key, variable=bool(item.origin.variable_prefix))
    if why is None:
        choice = nearest(item.key, [*RENAMED, *WHY_NOT, *ALIASES])
        raise ConfigError(
            f"{item.where}: LMCache has no setting {item.key}{hint(choice and item.origin.spell(choice))}"
        )
    return [] if _asks_nothing(item) else [f"{item.where}: {item.key}: {why}"]


def _why_not(key: str, *, variable: bool) -> str | None:
    family = next((why for prefix, why in WHY_NOT_PREFIXES.items() if key.startswith(prefix)), None)
    return WHY_NOT.get(key) or family or (WHY_NOT_VARIABLES.get(key) if variable else None)


def _is_known(key: str) -> bool:
    return key in RENAMED or key == "extra_config" or _why_not(key, variable=False) is not None


def _asks_nothing(item: Found) -> bool:
    text = str(item.value).strip().lower()
    return text == DEFAULTS[item.key] if item.key in DEFAULTS else text in _OFF


def _modern(key: str) -> str:
    return ALIASES.get(key, key)


def _renamed(origin: Origin, key: str) -> Origin:
    """The origin with the line of an older key under today's name."""
    if key == _modern(key) or (key,) not in origin.lines:
        return origin
    return Origin(origin.name, {(_modern(key),): origin.lines[key,]})


def _unquoted(text: str) -> str:
    """LMCache takes quotes around a variable's whole value off."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text
