"""The options of a config type as a person reads them: their kinds, defaults and meanings."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import PydanticUndefined

from lmcache_async.config import format_size

_ENTRY = re.compile(r"^    (\w+): (.*(?:\n      +.*)*)", re.MULTILINE)
_SIZES = re.compile(r"bytes")


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: Its key; with a dot where it is of a section.
        kind: What may be written, such as `size` or `auto | true`.
        default: As it would be written; None where the option has to be given.
        help: What it means.
    """

    name: str
    kind: str
    default: str | None
    help: str


def options_of(model: type[BaseModel]) -> tuple[Option, ...]:
    """Every option, those of sections among them."""
    helps, kinds = helps_of(model), _kinds(model)
    found: list[Option] = []
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner = options_of(info.annotation)
            found += [Option(f"{name}.{one.name}", one.kind, one.default, one.help) for one in inner]
        else:
            default = info.get_default(call_default_factory=True, validated_data={})
            found.append(Option(name, kinds.get(name, "any"), shown(default, name), helps.get(name, "")))
    return tuple(found)


def helps_of(model: type[BaseModel]) -> dict[str, str]:
    """What each field means: its own description, or what the docstring of its class says."""
    helps: dict[str, str] = {}
    for base in reversed(model.__mro__):
        _, _, attributes = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        helps |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(attributes)}
    described = {name: info.description for name, info in model.model_fields.items() if info.description}
    return {name: text for name, text in (helps | described).items() if name in model.model_fields}


def shown(value: Any, name: str = "") -> str | None:
    """A value as it would be written; no secret is."""
    if value is PydanticUndefined:
        return None
    if isinstance(value, SecretStr):
        return "***"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and _SIZES.search(name) and value:
        return format_size(value).replace(" ", "")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(str(shown(item)) for item in value) + "]"
    return str(value)


def _kinds(model: type[BaseModel]) -> dict[str, str]:
    try:
        schema = model.model_json_schema()
    except PydanticInvalidForJsonSchema:  # of somebody else's types
        return {}
    return {name: _kind(part, schema.get("$defs", {}), name) for name, part in schema["properties"].items()}


def _kind(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> str:
    if reference := schema.get("$ref"):
        return _kind(definitions[reference.rpartition("/")[2]], definitions, name)
    if "enum" in schema or "const" in schema:
        return " | ".join(str(one) for one in schema.get("enum", [schema.get("const")]))
    if choices := schema.get("anyOf"):
        kinds = [_kind(choice, definitions, name) for choice in choices]
        if "true or false" in kinds:  # and its further spellings
            words = [kind for kind in kinds if kind not in {"text", "true or false"} and "yes" not in kind]
            return " | ".join([*words, "true or false"])
        numbers = [kind for kind in kinds if kind in {"whole number", "number", "size"}]
        rest = [kind for kind in kinds if kind not in {"text", *numbers} and not kind.startswith(" |")]
        return " | ".join(dict.fromkeys([*(numbers or ["text"] * ("text" in kinds)), *rest]))
    if schema.get("format") in {"path", "password"}:
        return {"path": "path", "password": "secret"}[schema["format"]]
    kind = schema.get("type")
    if kind == "integer":
        return "size" if _SIZES.search(name) else "whole number"
    names = {"number": "number", "boolean": "true or false", "string": "text", "null": "none"}
    return {**names, "array": "list", "object": "mapping"}.get(str(kind), "any")
