"""Options of a tier or layer, from its pydantic model: type, default and description of each."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticUndefined, core_schema

from lmcache_async.config import format_size
from lmcache_async.registry import LAYERS, STAGES, TIERS
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.middleware.base import Layer

KINDS = {"tier": TIERS, "layer": LAYERS, "stage": STAGES}
"""Entry-point group of each kind of plug-in."""

_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n      +.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its dotted key, its type in words, its default as in a file (None: required), its description."""

    name: str
    kind: str
    default: str | None
    help: str


def options_type(kind: str, target: Any) -> type[BaseModel] | None:
    """Return the model of the options of a tier or a layer; None for a stage."""
    if kind == "stage":
        return None
    found: object = None
    if isinstance(target, type):
        if kind == "tier" and issubclass(target, Tier):
            found = target.config_type
        elif kind == "layer" and issubclass(target, Layer):
            found = target.options_type
    if found is None:
        raise TypeError(f"{target!r} is not a subclass of {'Tier' if kind == 'tier' else 'Layer'}")
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise TypeError(f"its options are {found!r}, not a pydantic model")
    return found


def options_of(model: type[BaseModel]) -> tuple[Option, ...]:
    """Return all options, including those of sections."""
    schema = schema_of(model)
    found: list[Option] = []
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner = options_of(info.annotation)
            found += [Option(f"{name}.{one.name}", one.kind, one.default, one.help) for one in inner]
        else:
            part = schema["properties"].get(name, {})
            default = info.get_default(call_default_factory=True, validated_data={})
            kind = _kind(part, schema.get("$defs", {}), name)
            found.append(Option(name, kind, shown(default, name), part.get("description", "")))
    return tuple(found)


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model without titles, in which every field has its description."""
    try:
        return model.model_json_schema(schema_generator=_DescribedSchema)
    except PydanticInvalidForJsonSchema:  # types of a third-party plug-in
        helps = _helps(model)
        parts = {name: {"description": helps[name]} if name in helps else {} for name in model.model_fields}
        return {"type": "object", "properties": parts}


def shown(value: Any, name: str = "") -> str | None:
    """Format a value as it is written in a file; a secret as `***`, no default as None."""
    if value is PydanticUndefined:
        return None
    if isinstance(value, SecretStr):
        return "***"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "bytes" in name and value:
        return format_size(value).replace(" ", "")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(str(shown(item)) for item in value) + "]"
    return str(value)


def _kind(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> str:
    if reference := schema.get("$ref"):
        return _kind(definitions[reference.rpartition("/")[2]], definitions, name)
    if "enum" in schema or "const" in schema:
        return " | ".join(str(one) for one in schema.get("enum", [schema.get("const")]))
    if choices := schema.get("anyOf"):
        kinds = [_kind(choice, definitions, name) for choice in choices]
        if "true or false" in kinds:  # without its further spellings
            words = [kind for kind in kinds if kind not in {"text", "true or false"} and "yes" not in kind]
            return " | ".join([*words, "true or false"])
        numbers = [kind for kind in kinds if kind in {"whole number", "number", "size"}]
        rest = [kind for kind in kinds if kind not in {"text", *numbers} and not kind.startswith(" |")]
        return " | ".join(dict.fromkeys([*(numbers or ["text"] * ("text" in kinds)), *rest]))
    if schema.get("format") in {"path", "password"}:
        return {"path": "path", "password": "secret"}[schema["format"]]
    kind = schema.get("type")
    if kind == "integer":
        return "size" if "bytes" in name else "whole number"
    names = {"number": "number", "boolean": "true or false", "string": "text", "null": "none"}
    return {**names, "array": "list", "object": "mapping"}.get(str(kind), "any")


class _DescribedSchema(GenerateJsonSchema):
    """Generator of `schema_of`."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        result = super().model_schema(schema)
        result.pop("title", None)
        if "description" in result:
            result["description"] = result["description"].partition("\n")[0]
        for name, text in _helps(schema["cls"]).items():
            if name in result.get("properties", {}):
                result["properties"][name]["description"] = text
        return result


def _helps(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field: its own, or the one in the docstring of its class."""
    helps: dict[str, str] = {}
    for base in reversed(model.__mro__):
        _, _, attributes = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        helps |= {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(attributes)}
    fields = model.model_fields.items()
    described = {name: " ".join(info.description.split()) for name, info in fields if info.description}
    return {name: text for name, text in (helps | described).items() if name in model.model_fields}
