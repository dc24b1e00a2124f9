"""One typed config out of a mapping, the environment and a file, in this order of precedence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lmcache_async.config.explain import KeyPath, Origin, explain
from lmcache_async.config.model import EngineConfig, TierSpec
from lmcache_async.config.sources import CONFIG_FILE, PREFIX, Setting, read_file, read_variables, settings_of
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

EXTRA = "kv_connector_extra_config"
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
        ConfigError: A key or a value is wrong.
    """
    env = os.environ if env is None else env
    extra = dict(extra or {})
    settings: list[Setting] = []  # the later ones win
    file = _config_file(path, env, extra.pop("config_file", None))
    if file is not None:
        document = read_file(file)
        settings += settings_of(document.content, document.origin)
    settings += read_variables(env)
    settings += settings_of(extra, Origin(EXTRA))
    return build(settings)


def build(settings: Iterable[Setting]) -> EngineConfig:
    """The config from settings, of which a later one for the same key wins.

    Raises:
        ConfigError: A value is wrong.
    """
    content: dict[str, Any] = {}
    origins: dict[KeyPath, Origin] = {}
    for setting in settings:
        section = content
        for part in setting.path[:-1]:
            section = section.setdefault(part, {})
        section[setting.path[-1]] = setting.value
        origins[setting.path] = setting.origin
    try:
        config = EngineConfig.model_validate(content)
    except ValidationError as error:
        raise explain(error, EngineConfig, origins, _DEFAULTS) from None
    return config.model_copy(
        update={"tiers": tuple(_placed(config.tiers, origins.get(("tiers",), _DEFAULTS)))}
    )


def _placed(tiers: Iterable[TierSpec], origin: Origin) -> Iterable[TierSpec]:
    for index, tier in enumerate(tiers):
        path = ("tiers", index)
        yield tier.placed(f"{origin.at(path)}: tiers[{index}] ({tier.id})")


def _config_file(path: Path | None, env: Mapping[str, str], from_extra: object) -> Path | None:
    if path is not None:
        return path
    if from_extra is not None:
        if not isinstance(from_extra, str | os.PathLike) or not os.fspath(from_extra):
            raise ConfigError(f"{EXTRA}: config_file is {from_extra!r}: expected the path of a YAML file")
        return Path(from_extra)
    name = env.get(PREFIX + CONFIG_FILE, "").strip()
    return Path(name) if name else None
