"""`lmcache-async tiers`: installed tiers, layers and stages, with their options and capabilities."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticUndefined, core_schema
from typer import Argument

from lmcache_async.cli.output import JSONFlag, print_json, refuse, say
from lmcache_async.config import format_size
from lmcache_async.config.validation import hint, nearest
from lmcache_async.errors import LMCacheAsyncError
from lmcache_async.pipeline.stage import describe_stage
from lmcache_async.registry import LAYERS, STAGES, TIERS, Plugin, Registry
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One plug-in. `problem` is the reason if it cannot be used here; `details` are properties such as capabilities."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    problem: str = ""
    summary: str = ""
    options: tuple[Option, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def complete_tiers(incomplete: str) -> list[str]:
    """Return the installed plug-ins whose names begin with the text. Imports none."""
    registry = Registry()
    names = {name for group in KINDS.values() for name in registry.available(group)}
    return sorted(name for name in names if name.startswith(incomplete))


def tiers_command(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="A tier, layer or stage to describe in detail.",
            autocompletion=complete_tiers,
        ),
    ] = None,
    as_json: JSONFlag = False,
) -> None:
    """List the installed tiers, layers and stages, with the reason if one cannot be used."""
    registry = Registry()
    entries = [
        examine(kind, plugin, registry)
        for kind, group in KINDS.items()
        for plugin in registry.available(group).values()
    ]
    if name is not None:
        names = {entry.name for entry in entries}
        entries = [entry for entry in entries if entry.name == name]
        if not entries:
            refuse(
                f"there is no tier, layer or stage {name}{hint(nearest(name, names))}"
                " (lmcache-async tiers lists all)"
            )
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    for line in _list(entries) if name is None else _details(entries):
        say(line)


def examine(kind: str, plugin: Plugin, registry: Registry) -> Entry:
    known = (kind, plugin.name, plugin.distribution, plugin.version, plugin.value)
    try:
        target: Any = registry.load(KINDS[kind], plugin.name)
    except LMCacheAsyncError as error:
        return Entry(*known, problem=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a third-party module may raise anything
        return Entry(*known, problem=f"it cannot be imported from {plugin.value}: {_short(error)}")
    own = target.__doc__  # `inspect.getdoc` returns that of a base class if there is none
    summary = inspect.cleandoc(own or "").partition("\n")[0]
    try:
        model = options_type(kind, target)
        if model is None:
            return Entry(*known, summary=summary, details=_stage_details(plugin.name, target))
        details = _tier_details(target, model) if kind == "tier" else {"fits_arena": target.fits_arena}
        return Entry(*known, summary=summary, options=options_of(model), details=details)
    except Exception as error:  # noqa: BLE001 - as above
        return Entry(*known, problem=_short(error), summary=summary)


def _stage_details(name: str, target: Any) -> dict[str, Any]:
    info = describe_stage(name, target)
    return {
        "takes": _type_name(info.takes),
        "gives": _type_name(info.gives),
        "uses": list(inspect.signature(target).parameters) if inspect.isclass(target) else [],
        "per_request": info.per_request,
        "ordered": info.ordered,
    }


def _tier_details(target: type[Tier], model: type[BaseModel]) -> dict[str, Any]:
    """Return the capabilities with default options, and the methods that replace a default of `Tier`."""
    needed = {name: _sample(info) for name, info in model.model_fields.items() if info.is_required()}
    capabilities = None
    with contextlib.suppress(Exception):  # the tier needs real options
        capabilities = asdict(target(model.model_construct(**needed)).capabilities)
    defaults = inspect.getmembers(
        Tier, lambda value: inspect.isfunction(value) and not hasattr(value, "__isabstractmethod__")
    )
    overrides = [name for name, value in defaults if name[0] != "_" and getattr(target, name) is not value]
    return {"capabilities": capabilities, "overrides": overrides}


def _sample(info: FieldInfo) -> Any:
    """Return an example of a required option, or a value of its type; None for other types."""
    if info.examples:
        return info.examples[0]
    kind: Any = get_origin(info.annotation) or info.annotation
    return {int: 1, float: 1.0, str: "", Path: Path(), tuple: (None,), list: [None], dict: {}}.get(kind)


def _list(entries: list[Entry]) -> Iterator[str]:
    width = max(len(entry.name) for entry in entries)
    for kind in KINDS:
        yield f"{kind}s"
        for entry in entries:
            if entry.kind == kind:
                origin = f"{entry.distribution} {entry.version}"
                yield f"  {entry.name:<{width}}  {origin}  {entry.summary if not entry.problem else ''}".rstrip()
                if entry.problem:
                    yield f"  {'':<{width}}  cannot be used: {entry.problem}"


def _details(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        yield f"{entry.kind} {entry.name}, of {entry.distribution} {entry.version} ({entry.value})"
        if entry.problem:
            yield f"  cannot be used: {entry.problem}"
        if entry.summary:
            yield f"  {entry.summary}"
        for name, value in entry.details.items():
            yield f"  {name}: {_detail(value)}"
        if entry.options:
            yield "  options:"
        for option in entry.options:
            default = "required" if option.default is None else f"default {option.default or repr('')}"
            yield f"    {option.name}: {option.kind}; {default}"
            if option.help:
                yield f"      {option.help}"


def _detail(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown}" for key, shown in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "depends on the options" if value is None else value


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.300}".replace("\n", " ")


def options_type(kind: str, target: Any) -> type[BaseModel] | None:
    """Return the model of the options of a tier or a layer; None for a stage."""
    if kind == "stage":
        return None
    base: type[Tier | Layer] = Tier if kind == "tier" else Layer
    if not (isinstance(target, type) and issubclass(target, base)):
        raise TypeError(f"{target!r} is not a subclass of {base.__name__}")
    found: object = target.config_type if issubclass(target, Tier) else target.options_type
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
    """Format a value as it is written in a file, and a secret as `***`. Return None for a missing default."""
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
        if "true or false" in kinds:  # omit the text spellings of a flag
            words = [kind for kind in kinds if kind not in {"text", "true or false"} and "yes" not in kind]
            return " | ".join([*words, "true or false"])
        numbers = [kind for kind in kinds if kind in {"whole number", "number", "size"}]
        rest = [kind for kind in kinds if kind not in {"text", *numbers} and not kind.startswith(" |")]
        words = " | ".join([*(numbers or ["text"] * ("text" in kinds)), *rest]).split(" | ")
        return " | ".join(dict.fromkeys(filter(None, words)))
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
