"""`lmcache-async config`: values and their sources, errors, and the JSON schema of a configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from pydantic import BaseModel
from typer import Argument, Option

from lmcache_async.cli.output import PROBLEM, JSONFlag, print_json, refuse, say
from lmcache_async.cli.tiers import KINDS, options_type, schema_of, shown
from lmcache_async.config import (
    EngineConfig,
    LayerSpec,
    TierSpec,
    survey_config,
    validate_options,
)
from lmcache_async.config.model import PluginSpec
from lmcache_async.config.secrets import SECRET_PATHS
from lmcache_async.config.validation import (
    KeyPath,
    Loaded,
    Origin,
    is_secret,
    placed_lines,
    spell_path,
    without_secrets,
    without_user,
)
from lmcache_async.daemon.config import DaemonConfig, survey_daemon_config
from lmcache_async.engine.check import all_problems
from lmcache_async.engine.tiers import USUAL_ARENA_LAYERS, USUAL_LAYERS, make_tier
from lmcache_async.metrics.endpoint import check_endpoint
from lmcache_async.registry import LAYERS, STAGES, Registry
from lmcache_async.tiers.middleware.base import Layer

DEFAULT = "default"
Value: TypeAlias = dict[str, str]
"""The dotted `key`, its `value` as it is written in a file (`***` for a secret), and the `source` where it was set."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"

config_command = typer.Typer(no_args_is_help=True, add_completion=False)

DaemonFlag = Annotated[
    bool, Option("--daemon", help="The file configures lmcache-async serve, not an engine.")
]
ExtraOption = Annotated[
    str | None, Option(metavar="JSON", help="vLLM's kv_connector_extra_config; overrides the file.")
]


@config_command.command("show")
def show_command(
    file: Annotated[
        Path | None,
        Argument(
            metavar="FILE",
            help="A YAML file; by default the file that the environment names.",
            dir_okay=False,
        ),
    ] = None,
    extra: ExtraOption = None,
    daemon: DaemonFlag = False,
    changed: Annotated[bool, Option("--changed", help="Omit defaults.")] = False,
    as_json: JSONFlag = False,
) -> None:
    """Print every key with its value and source. Secrets are not shown."""
    loaded: Loaded[Any]
    if daemon:
        loaded = survey_daemon_config(file, {} if file is not None else {"max_bytes": "1GiB"})
    else:
        loaded = survey_config(file, extra=_parse_extra(extra))
    if loaded.problems:
        refuse("\n".join(loaded.problems), PROBLEM)
    values = [*config_values(loaded, Registry())]
    if daemon and file is None:  # serve needs it as an option
        values = [
            format_value((one["key"],), "required", None) if one["key"] == "max_bytes" else one
            for one in values
        ]
    values = [one for one in values if not changed or one["source"] != DEFAULT]
    if as_json:
        print_json({"values": values, "notes": loaded.notes})
        return
    keys = max((len(one["key"]) for one in values), default=0)
    texts = min(48, max((len(one["value"]) for one in values), default=0))
    for one in values:
        say(f"{one['key']:<{keys}}  {one['value'] or repr(''):<{texts}}  {one['source']}")
    _print_notes(loaded.notes)


@config_command.command("check")
def check_command(
    file: Annotated[Path, Argument(metavar="FILE", help="A YAML file.", dir_okay=False)],
    extra: ExtraOption = None,
    daemon: DaemonFlag = False,
    as_json: JSONFlag = False,
) -> None:
    """Print every error of a configuration, one per line. Exits with 1 if there is an error.

    Plug-ins are imported and secret files are read, as by an engine. No connection is opened.
    """
    found, notes = check_daemon_file(file) if daemon else check_file(file, _parse_extra(extra))
    if as_json:
        print_json({"file": str(file), "problems": found, "notes": notes})
    else:
        for line in found:
            say(line)
        _print_notes(notes)
        if not found:
            say(f"{file}: valid")
    if found:
        raise typer.Exit(PROBLEM)


@config_command.command("schema")
def schema_command(daemon: DaemonFlag = False) -> None:
    """Print the JSON schema of a config file, with the options of all installed tiers, layers and stages.

    Editors use it to complete keys and mark errors; docs/config.md describes how.
    """
    print_json(daemon_schema() if daemon else engine_schema(Registry()))


def check_file(
    file: Path | None, extra: dict[str, Any] | None = None, registry: Registry | None = None
) -> tuple[list[str], tuple[str, ...]]:
    """Return the errors of an engine's configuration, and the settings without effect."""
    loaded = survey_config(file, extra=extra)
    return all_problems(loaded, registry or Registry()), loaded.notes


def check_daemon_file(file: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the errors of a daemon's configuration and of the files that it names, and options without effect."""
    loaded = survey_daemon_config(file, {})
    problems = [*loaded.problems, *placed_lines(check_endpoint(loaded.config.http), loaded.origin.at)]
    return problems, loaded.notes


def _parse_extra(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"--extra: not JSON: {error}")
    if not isinstance(extra, dict):
        refuse('--extra: expected a mapping, such as {"arena.max_bytes": "8GiB"}')
    return extra


def _print_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        say(f"no effect: {note}", to_stderr=True)


def config_values(loaded: Loaded[Any], registry: Registry) -> Iterator[Value]:
    """Yield all keys of a configuration, including the options of its tiers and layers."""
    origin, is_engine = loaded.origin, isinstance(loaded.config, EngineConfig)
    for path, value in flatten(loaded.config):
        if path == ("tiers",):
            for index, tier in enumerate(value):
                yield from _tier_values(tier, (*path, index), loaded, registry)
        else:
            yield format_value(path, value, origin.own_place(path) if is_engine else origin.places.get(path))


def flatten(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value with its path, including those of nested models and mappings."""
    if isinstance(value, BaseModel):
        for name, inner in value:
            yield from flatten(inner, (*path, name))
    elif isinstance(value, Mapping) and value and not is_secret(spell_path(path)):
        for key, inner in value.items():
            yield from flatten(inner, (*path, str(key)))
    else:
        yield path, value


def format_value(path: KeyPath, value: Any, source: str | None) -> Value:
    key = spell_path(path)
    own = next((part for part in reversed(path) if isinstance(part, str)), "")
    text = shown(without_secrets(value, own), key) or ""
    if is_secret(key) and isinstance(value, str | list | tuple) and value:
        text = "***"
    return {"key": key, "value": without_user(text), "source": source or DEFAULT}


def _tier_values(tier: TierSpec, path: KeyPath, loaded: Loaded[Any], registry: Registry) -> Iterator[Value]:
    third_party = loaded.config.plugins.third_party
    for name in ("name", "id", "timeout_s", "open_timeout_s"):
        given = name == "name" or (name in tier.model_fields_set and (name != "id" or tier.id != tier.name))
        yield format_value(
            (*path, name), getattr(tier, name), loaded.origin.own_place((*path, name)) if given else None
        )
    options, layers = None, tier.layers
    usual = USUAL_LAYERS
    # Errors are reported by `config check`. Here, invalid options are shown as given.
    with contextlib.suppress(Exception):
        made = make_tier(tier, registry, third_party=third_party)
        usual = USUAL_ARENA_LAYERS if made.capabilities.in_arena else USUAL_LAYERS
        options = made.config
    yield from _option_values(tier, options, path, tier.origin.place)
    if layers == ():
        yield format_value((*path, "layers"), layers, loaded.origin.own_place((*path, "layers")))
    for index, layer in enumerate(usual if layers is None else layers):
        at = (*path, "layers", index)
        source = None if layers is None else loaded.origin.own_place(at)
        yield format_value((*at, "name"), layer.name, source)
        if layer.id != layer.name:
            yield format_value((*at, "id"), layer.id, source)
        options = None
        with contextlib.suppress(Exception):
            layer_class = registry.load_class(LAYERS, layer.name, Layer, third_party=third_party)
            options = validate_options(layer_class.options_type, layer.options, "")
        yield from _option_values(layer, options, at, Origin(source or DEFAULT).place)


def _option_values(
    spec: PluginSpec, options: BaseModel | None, path: KeyPath, source_of: Callable[[KeyPath], str | None]
) -> Iterator[Value]:
    """Yield the validated options of a plug-in, or the options as given if `options` is None."""
    given = (((key,), value) for key, value in spec.options.items())
    for key, value in given if options is None else flatten(options):
        yield format_value((*path, *key), value, source_of(key) if key[0] in spec.options else None)


def engine_schema(registry: Registry) -> dict[str, Any]:
    """Return the schema of an engine's file. It accepts the usual spellings only."""
    schema = schema_of(EngineConfig)
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
    _loosen_sections(properties, definitions, registry)
    return {"$schema": DIALECT, "title": "lmcache-async", **schema}


def daemon_schema() -> dict[str, Any]:
    """Return the schema of the file of `lmcache-async serve`. `max_bytes` may also be a command-line option."""
    schema = schema_of(DaemonConfig)
    schema.pop("required", None)
    return {"$schema": DIALECT, "title": "lmcache-async serve", **schema}


def _loosen_sections(properties: dict[str, Any], definitions: dict[str, Any], registry: Registry) -> None:
    """Accept empty sections and dotted keys, and refuse secrets."""
    stages = list(registry.available(STAGES))
    for name, info in EngineConfig.model_fields.items():
        if (name,) in SECRET_PATHS:
            del properties[name]
        section = info.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            continue
        inner = definitions[section.__name__]["properties"]
        for key in [key for key in inner if (name, key) in SECRET_PATHS]:
            del inner[key]
        if "stages" in inner:
            names = {"type": "array", "minItems": 1, "items": {"enum": stages}}
            inner["stages"] |= {"anyOf": [names, {"type": "string"}]}
        properties[name] = {
            "anyOf": [{"$ref": f"#/$defs/{section.__name__}"}, {"type": "null"}],
            "description": definitions[section.__name__]["description"],
        }
        properties |= {f"{name}.{key}": part for key, part in inner.items()}


def _plugins(
    kind: str, spec: type[PluginSpec], registry: Registry, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return the schema of a plug-in: its name, or a mapping with its name and its own options."""
    names = list(registry.available(KINDS[kind]))
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
    """Return the schema of the mapping of one plug-in, with its options beside `name` or under `options`."""
    own = None
    with contextlib.suppress(Exception, SystemExit):  # a third-party module may raise anything
        model = options_type(kind, registry.load(KINDS[kind], name))
        own = None if model is None else schema_of(model)
    beside = schema_of(spec)["properties"]
    beside["name"] = {"const": name}
    if kind == "tier":
        beside["layers"] = {
            "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/layer"}}, {"type": "null"}],
            "description": spec.model_fields["layers"].description,
        }
    if own is None:  # it cannot be imported here
        return {"type": "object", "properties": beside}
    definitions.update(own.pop("$defs", {}))
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
