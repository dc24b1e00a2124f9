"""The JSON schema of a config file, with the options of every plug-in that is installed; for editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from lmcache_async.cli.catalog import KINDS, options_type
from lmcache_async.cli.options import helps_of
from lmcache_async.config import EngineConfig, LayerSpec, TierSpec
from lmcache_async.config.model import PluginSpec
from lmcache_async.config.secrets import SECRET_PATHS
from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def engine_schema(registry: Registry) -> dict[str, Any]:
    """Of an engine's file. It takes what the file of an engine here may have, and its usual spellings alone."""
    schema = _of(EngineConfig)
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    for name in ("TierSpec", "LayerSpec"):
        definitions.pop(name, None)
    definitions["layer"] = _plugins("layer", LayerSpec, registry, definitions)
    definitions["tier"] = _plugins("tier", TierSpec, registry, definitions)
    properties = schema["properties"]
    properties["tiers"] = {
        "type": "array",
        "minItems": 1,
        "items": {"$ref": "#/$defs/tier"},
        "description": EngineConfig.model_fields["tiers"].description,
    }
    _sections(properties, definitions, registry)
    return {"$schema": DIALECT, "title": "lmcache-async", **schema}


def daemon_schema() -> dict[str, Any]:
    """Of the file of `lmcache-async serve`, where `max_bytes` may also be its option."""
    schema = _of(DaemonConfig)
    schema.pop("required", None)
    return {"$schema": DIALECT, "title": "lmcache-async serve", **schema}


def _sections(properties: dict[str, Any], definitions: dict[str, Any], registry: Registry) -> None:
    """Sections may be empty, and their keys may be written with a dot; secrets have no place in a file."""
    stages = list(registry.available(STAGES))
    for name, info in EngineConfig.model_fields.items():
        if (name,) in SECRET_PATHS:
            del properties[name]
        section = info.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            continue
        definition = definitions[section.__name__]
        for key in [key for key in definition["properties"] if (name, key) in SECRET_PATHS]:
            del definition["properties"][key]
        if "stages" in definition["properties"]:
            definition["properties"]["stages"] |= {"anyOf": [_names(stages), {"type": "string"}]}
        properties[name] = {
            "anyOf": [{"$ref": f"#/$defs/{section.__name__}"}, {"type": "null"}],
            "description": info.description,
        }
        for key, part in definition["properties"].items():
            properties[f"{name}.{key}"] = part


def _plugins(
    kind: str, spec: type[PluginSpec], registry: Registry, definitions: dict[str, Any]
) -> dict[str, Any]:
    """One plug-in: its name alone, or a mapping with its name and options, each kind with its own."""
    group = {"tier": TIERS, "layer": LAYERS}[kind]
    names = list(registry.available(group))
    choices = []
    for name in names:
        definitions[f"{kind}-{name}"] = _plugin(kind, name, spec, registry, definitions)
        condition = {"properties": {"name": {"const": name}}}
        choices.append({"if": condition, "then": {"$ref": f"#/$defs/{kind}-{name}"}})
    mapping = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"enum": names}},
        "allOf": choices,
    }
    return {"if": {"type": "string"}, "then": {"enum": names}, "else": mapping}


def _plugin(
    kind: str, name: str, spec: type[PluginSpec], registry: Registry, definitions: dict[str, Any]
) -> dict[str, Any]:
    """A mapping of that plug-in; its options may also be under `options`."""
    own = _own_options(kind, name, registry, definitions)
    beside = _of(spec)["properties"]
    beside["name"] = {"const": name}
    if kind == "tier":
        beside["layers"] = {
            "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/layer"}}, {"type": "null"}],
            "description": spec.model_fields["layers"].description,
        }
    if own is None:  # it cannot be asked here
        return {"type": "object", "properties": beside}
    required = own.pop("required", [])
    beside["options"] = {**own, "description": f"Options of the {kind}."}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": own["properties"] | beside,
        "additionalProperties": False,
    }
    if required:
        schema |= {"if": {"not": {"required": ["options"]}}, "then": {"required": required}}
    return schema


def _own_options(
    kind: str, name: str, registry: Registry, definitions: dict[str, Any]
) -> dict[str, Any] | None:
    try:
        model = options_type(kind, registry.load(KINDS[kind], name))
        schema = _of(model) if model is not None else None
    except (Exception, SystemExit):  # noqa: BLE001 - whatever somebody else's module does
        return None
    if schema is not None:
        definitions.update(schema.pop("$defs", {}))
    return schema


def _of(model: type[BaseModel]) -> dict[str, Any]:
    """A model's schema, with the meaning of each field, and no object without end."""
    try:
        schema = model.model_json_schema()
    except PydanticInvalidForJsonSchema:
        return {"type": "object", "properties": {name: {} for name in model.model_fields}}
    _describe(schema, helps_of(model))
    for name, part in schema.get("$defs", {}).items():
        inner = _model_named(model, name)
        _describe(part, helps_of(inner) if inner is not None else {})
    schema.pop("title", None)
    return schema


def _describe(schema: dict[str, Any], helps: Mapping[str, str]) -> None:
    if "description" in schema:
        schema["description"] = schema["description"].partition("\n")[0]
    for name, part in schema.get("properties", {}).items():
        part.pop("title", None)
        if name in helps:
            part["description"] = helps[name]


def _model_named(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    for info in model.model_fields.values():
        for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found = kind if kind.__name__ == name else _model_named(kind, name)
                if found is not None:
                    return found
    return None


def _names(names: list[str]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": {"enum": names}}
