"""What holds: every key of a config with its value and where that came from. No secret is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lmcache_async.cli.options import shown
from lmcache_async.config import LayerSpec, LoadedConfig, TierSpec, validate_options
from lmcache_async.config.sources import read_file
from lmcache_async.config.validation import (
    KeyPath,
    Origin,
    is_secret,
    spell_path,
    without_secrets,
    without_user,
)
from lmcache_async.daemon.config import load_daemon_config
from lmcache_async.engine.tiers import USUAL_ARENA_LAYERS, USUAL_LAYERS, load_layer, load_tier
from lmcache_async.registry import Registry

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Value:
    """One key.

    Attributes:
        key: As it is written with dots.
        value: As it would be written; `***` for a secret.
        source: A file and its line, a variable, kv_connector_extra_config, or `default`.
    """

    key: str
    value: str
    source: str


def engine_values(loaded: LoadedConfig, registry: Registry) -> list[Value]:
    """All keys of an engine's config, the options of its tiers and layers among them."""
    values: list[Value] = []
    for path, value in _plain(loaded.config, ()):
        if path == ("tiers",):
            for index, tier in enumerate(loaded.config.tiers):
                values += _of_tier(tier, (*path, index), loaded, registry)
        else:
            values.append(_value(path, value, loaded.source_of(path)))
    return values


def daemon_values(file: Path | None, given: Mapping[str, Any]) -> list[Value]:
    """All keys of the daemon's config.

    Raises:
        ConfigError: Something is wrong with it.
    """
    config = load_daemon_config(file, given)
    content, origin = read_file(file, []) if file is not None else ({}, Origin(""))
    values: list[Value] = []
    for path, value in _plain(config, ()):
        if given.get(str(path[0])) is not None:
            source: str | None = f"--{str(path[0]).replace('_', '-')}"
        else:
            source = origin.at(path) if _is_in(path, content) else None
        values.append(_value(path, value, source))
    return values


def _plain(model: BaseModel, above: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every value with its path; models and mappings of them are gone through."""
    for name in type(model).model_fields:
        yield from _inside(getattr(model, name), (*above, name))


def _inside(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, BaseModel):
        yield from _plain(value, path)
    elif isinstance(value, Mapping) and value and not is_secret(spell_path(path)):
        for key, inner in value.items():
            yield from _inside(inner, (*path, str(key)))
    else:
        yield path, value


def _of_tier(tier: TierSpec, path: KeyPath, loaded: LoadedConfig, registry: Registry) -> Iterator[Value]:
    """Its own keys, its options, and its layers."""
    third_party = loaded.config.plugins.third_party
    source: str | None = tier.origin.place(())
    for name in ("name", "id", "timeout_s", "open_timeout_s"):
        given = name == "name" or (name in tier.model_fields_set and (name != "id" or tier.id != tier.name))
        yield _value((*path, name), getattr(tier, name), loaded.source_of((*path, name)) if given else None)
    in_arena = False
    try:
        tier_class = load_tier(registry, tier, third_party=third_party)
        options = validate_options(tier_class.config_type, tier.options, tier.origin)
        in_arena = tier_class(options).capabilities.in_arena
        plain = list(_plain(options, path))
    except Exception:  # noqa: BLE001 - what is wrong is for `config check`; here, what was given
        plain = [((*path, key), value) for key, value in tier.options.items()]
    for key, value in plain:
        given = key[len(path)] in tier.options
        yield _value(key, value, tier.origin.place(key[len(path) :]) if given else None)
    layers = tier.layers
    if layers is None:
        layers, source = (USUAL_ARENA_LAYERS if in_arena else USUAL_LAYERS), None
    for index, layer in enumerate(layers):
        at = (*path, "layers", index)
        where = source and loaded.source_of(at)
        yield from _of_layer(layer, at, where, registry, third_party=third_party)


def _of_layer(
    layer: LayerSpec, path: KeyPath, source: str | None, registry: Registry, *, third_party: bool
) -> Iterator[Value]:
    yield _value((*path, "name"), layer.name, source)
    try:
        layer_class = load_layer(registry, layer, "", third_party=third_party)
        plain = list(_plain(validate_options(layer_class.options_type, layer.options, ""), path))
    except Exception:  # noqa: BLE001 - as above
        plain = [((*path, key), value) for key, value in layer.options.items()]
    for key, value in plain:
        yield _value(key, value, source if key[len(path)] in layer.options else None)


def _value(path: KeyPath, value: Any, source: str | None) -> Value:
    key = spell_path(path)
    own = next((part for part in reversed(path) if isinstance(part, str)), "")
    text = shown(without_secrets(value, own), key) or ""
    if is_secret(key) and isinstance(value, str | list | tuple) and value:
        text = "***"
    return Value(key, without_user(text), source or DEFAULT)


def _is_in(path: KeyPath, content: Mapping[str, Any]) -> bool:
    inner: Any = content
    for part in path:
        if not isinstance(inner, Mapping) or part not in inner:
            return False
        inner = inner[part]
    return True
