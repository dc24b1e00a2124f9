"""Validation that finds every mistake, with messages that name place, key, value and the nearest right name."""

from __future__ import annotations

import difflib
import re
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from lmcache_async.config.values import parse_list, parse_mapping
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

LEFT_OUT = "_left_out_"
"""Name of the placeholder for an invalid tier or layer while the others of its list are validated."""

ModelT = TypeVar("ModelT", bound=BaseModel)
KeyPath: TypeAlias = tuple[str | int, ...]

_SECRET = re.compile(
    r"password|passwd|secret|(?<!max_)(?<!generated_)token(?!s_per)|credential|api_?key|^hash_key$"
    r"|^encryption(\.keys)?$",
    re.IGNORECASE,
)
_MAX_PASSES = 100  # each pass finds another kind of mistake
_NAMES_A_SECRET = re.compile(r"_(file|variable)$")


EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:.15g}",
    "greater_than_equal": "at least {ge:.15g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a number of fewer digits",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:.15g}",
    "list_type": "a list",
    "mapping_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "path_type": "a path",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "string_type": "text",
    "string_unicode": "text",
    "tuple_type": "a list",
}
"""The expected value, by the type of pydantic's error. Other errors keep pydantic's message."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value.

    Attributes:
        name: Path of the file, name of the variable or `kv_connector_extra_config`.
        lines: Line of each key in a file.
        variable_prefix: Prefix of the variable, so that hints are spelled as variables; "" for other sources.
        part: The part of the configuration to which paths are relative, such as `tiers[1] (disk)`; "" for all.
    """

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    variable_prefix: str = ""
    part: str = ""

    def at(self, path: KeyPath) -> str:
        """Return the place of a key: source, line of the innermost part with a line, and `part`."""
        return f"{self.place(path)}: {self.part}" if self.part else self.place(path)

    def place(self, path: KeyPath) -> str:
        """Return the place of a key without `part`."""
        line = self._nearest_line(path)
        return self.name if line is None else f"{self.name}, line {line}"

    def line(self, path: KeyPath) -> int | None:
        """Return the line of this key; None if the source has no such line."""
        return self.lines.get(path) or self.lines.get((".".join(str(key) for key in path),))

    def _nearest_line(self, path: KeyPath) -> int | None:
        return next((line for length in range(len(path), -1, -1) if (line := self.line(path[:length]))), None)

    def within(self, path: KeyPath, part: str) -> Origin:
        """Return the origin with paths relative to `path`. Keys under `options` are also keys of `path` itself."""
        lines = {key[len(path) :]: line for key, line in self.lines.items() if key[: len(path)] == path}
        if (line := self._nearest_line(path)) is not None:
            lines.setdefault((), line)
        for key, line in list(lines.items()):
            if key[:1] == ("options",) and len(key) > 1:
                lines.setdefault(key[1:], line)
        part = f"{self.part}, {part}" if self.part else part
        return Origin(self.name, lines, self.variable_prefix, part)

    def spell(self, key: str) -> str:
        return self.variable_prefix + key.upper().replace(".", "__") if self.variable_prefix else key


def spell_path(path: KeyPath) -> str:
    """Format `("tiers", 1, "path")` as `tiers[1].path`. Unprintable characters are escaped."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def known_keys(model: type[BaseModel]) -> list[str]:
    """Return all keys of the model in dotted form, including those of sections."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(name)
        for kind in (
            info.annotation,
            *getattr(info.annotation, "__args__", ()),
        ):  # including optional sections
            if isinstance(kind, type) and issubclass(kind, BaseModel) and not _is_mapping(info.annotation):
                keys += [f"{name}.{key}" for key in known_keys(kind)]
    return keys


def _is_mapping(annotation: Any) -> bool:
    return isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), abc.Container)


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `text`; None if no choice is similar."""
    choices = list(choices)
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(text.lower(), folded, n=1, cutoff=0.6)
    if close:
        return folded[close[0]]
    leaf = text.lower().rpartition(".")[2]
    same_leaf = [choice for choice in choices if choice.lower().rpartition(".")[2] == leaf]
    return same_leaf[0] if len(same_leaf) == 1 else None


def hint(choice: str | None) -> str:
    return f"; did you mean {choice}?" if choice else ""


def is_secret(key: str) -> bool:
    """Whether the value of the key is secret. The name of a file or a variable with a secret is not."""
    return bool(_SECRET.search(key)) and not _NAMES_A_SECRET.search(key)


def without_secrets(value: object, name: str = "") -> object:
    """Return the value with secrets replaced by `***`.

    None, booleans and empty values are kept.

    Args:
        value: The value; in mappings and models, the names of keys tell which values are secret.
        name: Name of the value itself.
    """
    if is_secret(name) and not (value is None or isinstance(value, bool) or value in ("", [], (), {})):
        return "***"
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, abc.Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return value


def without_user(text: str) -> str:
    """Remove users and passwords from URLs in the text."""
    return re.sub(r"//[^/@\s'\"]+@", "//***@", text)


def show(value: object, key: str = "") -> str:
    """Format a value for a message, short and without secrets."""
    if _SECRET.search(key):
        return "'***'"
    text = without_user(repr(without_secrets(value)))
    return text if len(text) <= 120 else f"{text[:117]}..."


def disagree(message: str, *keys: str) -> PydanticCustomError:
    """Return an error for values that are valid alone and invalid together.

    Args:
        message: The contradiction, and what to do.
        keys: All keys that take part, in dotted form, relative to the model. The message is placed at the first
            one that is set. If one of them is invalid by itself, only that mistake is reported.
    """
    return PydanticCustomError("disagree", "{message}", {"message": message, "keys": keys})


def validate_all(
    model: type[ModelT], content: Any, stand_ins: Mapping[KeyPath, Any] | None = None
) -> tuple[ModelT | None, list[ErrorDetails]]:
    """Validate the content and find every mistake.

    pydantic runs validators of several values only if each value is valid. Therefore invalid values are removed
    and the rest is validated again, until no mistake is left. A later mistake is ignored if it may result from a
    removal.

    Args:
        model: The model.
        content: The content; not modified.
        stand_ins: Values for required keys, used if the content has no valid one.

    Returns:
        The model made of the valid values, and the mistakes in the order in which they were found. The model is
        None if it cannot be made without the invalid or missing values.
    """
    stand_ins = stand_ins or {}
    errors: list[ErrorDetails] = []
    left_out: set[KeyPath] = set()
    for _ in range(_MAX_PASSES):
        try:
            return model.model_validate(content), errors
        except ValidationError as error:
            found = error.errors(include_url=False)
        errors += [one for one in found if not any(_near(path, left_out) for path in _paths(one))]
        places = {_place(one, content, left_out, stand_ins) for one in found}
        if () in places:
            break
        left_out |= places | {path for one in found if (path := _meant(one, model))}
        for place in places:
            if not any(place[:length] in places for length in range(len(place))):
                content = _without(content, place, stand_ins)
    return None, errors


def explain(
    errors: Iterable[ErrorDetails],
    keys: Sequence[str],
    origins: Mapping[KeyPath, Origin],
    default: Origin,
    advice: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a message for each of pydantic's errors.

    Args:
        errors: The errors.
        keys: All known keys, in dotted form.
        origins: Origin of each key.
        default: Origin of the other keys.
        advice: Advice for unknown keys, by their first part; by default the nearest known key.
    """
    return [_explain_one(one, keys, origins, default, advice or {}) for one in errors]


def validate_options(
    config_type: type[ModelT],
    options: Mapping[str, Any],
    where: str | Origin,
    *,
    beside: Sequence[str] = ("id", "timeout_s", "layers"),
) -> ModelT:
    """Validate the options of a tier or a layer.

    Args:
        config_type: Type of the options.
        options: The configured options.
        where: Their place; an Origin has the line of each option.
        beside: Keys of the plug-in besides its options, for the nearest right name.

    Raises:
        ConfigError: An option is unknown, invalid or missing; one line for each.
    """
    found, errors = validate_all(config_type, dict(options))
    if found is None or errors:
        origin = where if isinstance(where, Origin) else Origin(where)
        raise ConfigError("\n".join(explain(errors, [*known_keys(config_type), *beside], {}, origin)))
    return found


def placed_lines(lines: Iterable[str], source_of: Callable[[KeyPath], str | None]) -> Iterator[str]:
    """Prefix each line that begins with a key with the place where the key was set."""
    for line in lines:
        key = re.match(r"[a-z_]+(\.[a-z_]+)*(?=\W)", line)
        source = source_of(tuple(key[0].split("."))) if key else None
        yield f"{source}: {line}" if source else line


def unknown_key(origin: Origin, path: KeyPath, choices: Iterable[str]) -> str:
    """Return the message for a key that is not one of `choices` (in dotted form)."""
    key = spell_path(path)
    choice = nearest(key, choices)
    return f"{origin.at(path)}: there is no key {key}{hint(choice and origin.spell(choice))}"


def _explain_one(
    details: ErrorDetails,
    keys: Sequence[str],
    origins: Mapping[KeyPath, Origin],
    default: Origin,
    advice: Mapping[str, str],
) -> str:
    path, context = tuple(details["loc"]), details.get("ctx", {})
    if details["type"] == "disagree":
        paths = _paths(details)
        given = (path for path in paths if default.line(path) or _origin(path, origins))
        path = next(given, paths[0])
        return f"{(_origin(path, origins) or default).at(path)}: {spell_path(path)}: {context['message']}"
    origin = _origin(path, origins) or default
    if details["type"] in {"extra_forbidden", "invalid_key"}:
        if (found := advice.get(str(path[0]).partition(".")[0])) is not None:
            return f"{origin.at(path)}: there is no key {spell_path(path)}; {found}"
        return unknown_key(origin, path, keys)
    key = spell_path(path)
    if details["type"] == "missing":
        return f"{origin.at(path)}: {key} is missing"
    expected = _expected(details["type"], details["msg"], context)
    choices = (
        re.findall(r"'([^']*)'", context.get("expected", "")) if details["type"] == "literal_error" else ()
    )
    value = details["input"]
    return f"{origin.at(path)}: {key} is {show(value, key)}: {expected}{hint(nearest(str(value), choices))}"


def _expected(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """The expected value, in the words of our own parsers."""
    if (form := EXPECTED.get(kind)) is not None:
        return f"expected {form.format(**context)}"
    return message.removeprefix("Value error, ").replace("Input should be", "expected", 1)


def _origin(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    for length in range(len(path), 0, -1):
        if origin := origins.get(path[:length]):
            return origin
    return None


def _paths(details: ErrorDetails) -> list[KeyPath]:
    """The keys that take part in an error."""
    path = tuple(details["loc"])
    if details["type"] != "disagree":
        return [path]
    keys: Sequence[str] = details["ctx"]["keys"]
    return [
        path + tuple(int(part) if part.isdigit() else part for part in key.split(".") if part) for key in keys
    ]


def _meant(details: ErrorDetails, model: type[BaseModel]) -> KeyPath | None:
    """The known key nearest to an unknown one; None for other errors."""
    if details["type"] != "extra_forbidden":
        return None
    choice = nearest(spell_path(tuple(details["loc"])), known_keys(model))
    return tuple(choice.split(".")) if choice else None


def _near(path: KeyPath, left_out: Iterable[KeyPath]) -> bool:
    """Whether the path, a key above or a key below it was removed."""
    return any(path[: len(other)] == other or other[: len(path)] == path for other in left_out)


def _place(
    details: ErrorDetails, content: Any, left_out: set[KeyPath], stand_ins: Mapping[KeyPath, Any]
) -> KeyPath:
    """The key to remove because of an error: one that takes part, or the section around it if that had no effect."""
    paths = _paths(details)
    there = [path for path in paths if path in stand_ins or _reachable(content, path) == path]
    for path in there:
        if path not in left_out:
            return path
    place = there[0] if there else max((_reachable(content, path) for path in paths), key=len)
    while place and place in left_out:
        place = place[:-1]
    return place


def _reachable(content: Any, path: KeyPath) -> KeyPath:
    """The longest beginning of the path that exists in the content."""
    for length, part in enumerate(path):
        holder = _holder(content, part)
        if holder is None:
            has_id = _is_id(path[: length + 1]) and isinstance(content, str | abc.Mapping)
            return path[: length + has_id]
        content = holder[part]
    return path


def _is_id(path: KeyPath) -> bool:
    """Whether the path is the id of a list element; elements have ids also if none is set."""
    return len(path) > 1 and path[-1] == "id" and isinstance(path[-2], int)


def _without(content: Any, path: KeyPath, stand_ins: Mapping[KeyPath, Any], above: KeyPath = ()) -> Any:
    """A copy of the content without the value at the path, or with a valid one there."""
    part, rest = path[0], path[1:]
    if _is_id((*above, *path)) and not rest:
        item = {"name": content} if isinstance(content, str) else dict(content)
        return item | {"id": f"{item.get('id', item.get('name'))}-{above[-1]}"}
    holder = _holder(content, part)
    changed: Any = list(holder) if isinstance(holder, list | tuple) else dict(holder or content)
    if rest:
        changed[part] = _without(changed[part], rest, stand_ins, (*above, part))
    elif (*above, part) in stand_ins:
        changed[part] = stand_ins[*above, part]
    elif isinstance(part, int):  # keep the indices of the others
        changed[part] = {"name": LEFT_OUT, "id": f"{LEFT_OUT}{part}"}
    else:
        del changed[part]
    return changed


def _holder(content: Any, part: str | int) -> Any:
    """The mapping or list (or parsed JSON text) that has the key or index; None if it has none."""
    if isinstance(content, str):
        try:
            content = parse_list(content) if isinstance(part, int) else parse_mapping(content)
        except ValueError:
            return None
    if isinstance(content, abc.Mapping):
        return content if part in content else None
    return (
        content
        if isinstance(content, list | tuple) and isinstance(part, int) and part < len(content)
        else None
    )
