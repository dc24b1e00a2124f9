"""Validation that finds every mistake, with messages that contain place, key, value and the nearest valid name."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeAlias, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from lmcache_async.config.values import parse_list, parse_mapping
from lmcache_async.errors import ConfigError

PLACEHOLDER = "_removed_"
"""Name of the placeholder for an invalid tier or layer while the others of its list are validated."""

ModelT = TypeVar("ModelT", bound=BaseModel)
KeyPath: TypeAlias = tuple[str | int, ...]

_SECRET_NAME = r"password|passwd|secret|(?<!max_)(?<!generated_)token(?!s_per)|credential|api[-_]?key"
_SECRET = re.compile(rf"{_SECRET_NAME}|^hash_key$|^encryption(\.keys)?$", re.IGNORECASE)
_SECRET_IN_TEXT = re.compile(
    rf"(?:{_SECRET_NAME}|hash_key)(?!\w*_(?:file|variable)\b)[\w-]*\\?['\"]?\s*[:=,](?!\s*['\"]?\*\*\*)",
    re.IGNORECASE,
)
"""The name of a secret and the character before its value, in text such as invalid JSON."""
_NAMES_A_SECRET = re.compile(r"_(file|variable)$")
_VARIABLE = re.compile(r"LMCACHE_(ASYNC_)?(?=[A-Z0-9_]+$)")
_MAX_PASSES = 100  # each pass finds another kind of mistake

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
    """Places of the keys of a configuration, or of the part of it to which the keys are relative.

    A place is a file with a line, a variable, an option or `kv_connector_extra_config`. Keys below a key have its place,
    unless they have their own.
    """

    name: str  # place of keys without their own
    places: Mapping[KeyPath, str] = field(default_factory=dict)
    part: str = ""  # such as `tiers[1] (disk)`; "" for all

    def at(self, path: KeyPath) -> str:
        """Return the place of a key and `part`."""
        return f"{self.place(path)}: {self.part}" if self.part else self.place(path)

    def place(self, path: KeyPath) -> str:
        """Return the place of a key without `part`."""
        return self.own_place(path) or self.name

    def own_place(self, path: KeyPath) -> str | None:
        """Return the place of the key or of the innermost part around it; None if neither is set."""
        places = (self.places.get(path[:length]) for length in range(len(path), -1, -1))
        return next(filter(None, places), None)

    def within(self, path: KeyPath, part: str) -> Origin:
        """Return the origin with paths relative to `path`. Keys under `options` are also keys of `path` itself."""
        inner = {key[len(path) :]: place for key, place in self.places.items() if key[: len(path)] == path}
        options = {key[1:]: place for key, place in inner.items() if key[:1] == ("options",)}
        part = f"{self.part}, {part}" if self.part else part
        return Origin(self.place(path), options | {(): self.place(path)} | inner, part)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[ModelT]):
    """A configuration with the origins of its values. If there are problems, it has the valid values only."""

    config: ModelT
    origin: Origin
    notes: tuple[str, ...] = ()  # settings without effect
    problems: tuple[str, ...] = ()  # a line for each mistake

    def valid(self) -> Self:
        """Return self, or raise ConfigError with all problems if there are any."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return self


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
        origin = get_origin(info.annotation)
        is_container = isinstance(origin, type) and issubclass(origin, abc.Container)
        for kind in () if is_container else (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += [f"{name}.{key}" for key in known_keys(kind)]
    return keys


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `text`; None if no choice is similar. A section of `text` is no choice."""
    choices = [choice for choice in choices if not text.lower().startswith(f"{choice.lower()}.")]
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(text.lower(), folded, n=1, cutoff=0.6)
    if close:
        return folded[close[0]]
    leaf = text.lower().rpartition(".")[2]
    same_leaf = [choice for choice in choices if choice.lower().rpartition(".")[2] == leaf]
    return same_leaf[0] if len(same_leaf) == 1 else None


def hint(choice: str | None, place: str = "") -> str:
    """Return the end of a message, which suggests `choice`, as a variable if `place` is one; "" without a choice."""
    prefix = _VARIABLE.match(place)
    if choice and prefix:
        choice = prefix[0] + choice.upper().replace(".", "__")
    return f"; did you mean {choice}?" if choice else ""


def is_secret(key: str) -> bool:
    """Whether the value of the key is secret. The name of a file or a variable with a secret is not."""
    return bool(_SECRET.search(key)) and not _NAMES_A_SECRET.search(key)


def without_secrets(value: object, name: str = "") -> object:
    """Return the value with secrets replaced by `***`, depending on its name and the names of its keys.

    None, booleans and empty values are kept.
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
    """Remove users and passwords from URLs in the text, also passwords that are not percent-encoded."""
    return re.sub(r"(//|:(?!//))[^\s'\"]+@", r"\1***@", text)


def show(value: object, key: str = "") -> str:
    """Format a value for a message, short and without secrets."""
    if _SECRET.search(key):
        return "'***'"
    text = without_user(repr(without_secrets(value)))
    if found := _SECRET_IN_TEXT.search(text[:200]):
        text = f"{text[: found.end()]} ***"
    return text if len(text) <= 120 else f"{text[:117]}..."


def disagree(message: str, *keys: str) -> PydanticCustomError:
    """Return an error for values that are valid alone and invalid together. `message` says why, and what to do.

    `keys` are the keys of these values, in dotted form. The error is reported at the first key that is set. If a key
    is invalid by itself, only that mistake is reported.
    """
    return PydanticCustomError("disagree", "{message}", {"message": message, "keys": keys})


def validate_all(model: type[ModelT], content: Any) -> tuple[ModelT | None, list[ErrorDetails]]:
    """Return a model of the valid values of the content, or None if none can be made, and every mistake.

    pydantic runs validators of several values only if each value is valid. Therefore invalid values are removed
    and the rest is validated again, until no mistake is left. A later mistake is ignored if it may result from a
    removal.
    """
    content = _copied(content)
    errors: list[ErrorDetails] = []
    removed: set[KeyPath] = set()
    for _ in range(_MAX_PASSES):
        contradictions: list[PydanticCustomError] = []
        valid = None
        try:
            valid = model.model_validate(content, context=contradictions)
            found = [_details(one) for one in contradictions]
        except ValidationError as error:
            found = error.errors(include_url=False)
        errors += [one for one in found if not any(_overlaps(path, removed) for path in _paths(one))]
        if valid is not None:
            return valid, errors
        places = {_place(one, content, removed) for one in found}
        removed |= places | {path for one in found if (path := _nearest_known_key(one, model))}
        for place in places:
            if not any(place[:length] in places for length in range(len(place))) and not _remove(
                content, place
            ):
                return None, errors
    return None, errors


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
        beside: Keys of the plug-in other than its options; messages may suggest them.

    Raises:
        ConfigError: An option is unknown, invalid or missing; one line for each.
    """
    found, errors = validate_all(config_type, dict(options))
    if found is None or errors:
        origin = where if isinstance(where, Origin) else Origin(where)
        keys = [*known_keys(config_type), *beside]
        raise ConfigError("\n".join(explain(error, keys, origin) for error in errors))
    return found


def placed_lines(lines: Iterable[str], source_of: Callable[[KeyPath], str | None]) -> Iterator[str]:
    """Prefix each line that begins with a key with the place where the key was set."""
    for line in lines:
        key = re.match(r"[a-z_]+(\.[a-z_]+)*(?=\W)", line)
        source = source_of(tuple(key[0].split("."))) if key else None
        yield f"{source}: {line}" if source else line


def explain(
    details: ErrorDetails, keys: Sequence[str], origin: Origin, advice: Mapping[str, str] | None = None
) -> str:
    """Return the message of one of pydantic's errors.

    For an unknown key it contains the `advice` for the first part of the key, or else the nearest of `keys`, which are
    in dotted form.
    """
    kind, context, paths = details["type"], details.get("ctx", {}), _paths(details)
    path = next(filter(origin.places.__contains__, paths), paths[0])
    place, key = origin.at(path), spell_path(path)
    if kind == "disagree":
        return f"{place}: {key}: {context['message']}"
    if kind in {"extra_forbidden", "invalid_key"}:
        known = (advice or {}).get(str(path[0]).partition(".")[0])
        what_to_do = f"; {known}" if known else hint(nearest(key, keys), place)
        return f"{place}: there is no key {key}{what_to_do}"
    if kind == "missing":
        return f"{place}: {key} is missing"
    value = details["input"]
    choices = re.findall(r"'([^']*)'", context["expected"]) if kind == "literal_error" else ()
    if kind in EXPECTED:
        expected = "expected " + EXPECTED[kind].format(**context)
    else:  # the messages of our own parsers contain the expected value
        expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    name = f"{key} is " if key else ""
    return f"{place}: {name}{show(value, key)}: {expected}{hint(nearest(str(value), choices))}"


def _details(error: PydanticCustomError) -> ErrorDetails:
    return {"type": error.type, "loc": (), "msg": error.message(), "input": None, "ctx": error.context or {}}


def _paths(details: ErrorDetails) -> list[KeyPath]:
    """The keys that take part in an error."""
    path = tuple(details["loc"])
    if details["type"] != "disagree":
        return [path]
    keys: Sequence[str] = details["ctx"]["keys"]
    return [
        path + tuple(int(part) if part.isdigit() else part for part in key.split(".") if part) for key in keys
    ]


def _nearest_known_key(details: ErrorDetails, model: type[BaseModel]) -> KeyPath | None:
    """The known key nearest to an unknown one; None for other errors."""
    if details["type"] != "extra_forbidden":
        return None
    choice = nearest(spell_path(tuple(details["loc"])), known_keys(model))
    return tuple(choice.split(".")) if choice else None


def _overlaps(path: KeyPath, removed: Iterable[KeyPath]) -> bool:
    """Whether the path, a key above or a key below it was removed."""
    return any(path[: len(other)] == other or other[: len(path)] == path for other in removed)


def _place(details: ErrorDetails, content: Any, removed: set[KeyPath]) -> KeyPath:
    """Return the key to remove because of an error: one of its keys, or a section around them if they were removed before."""
    paths = _paths(details)
    there = [path for path in paths if _find(content, path)[1]]
    place = next((path for path in there if path not in removed), (there or paths)[0])
    while place and place in removed:
        place = place[:-1]
    return place


def _find(content: Any, path: KeyPath) -> tuple[Any, bool]:
    """Return the value at the path and whether it exists. Texts of lists and mappings above it are parsed in place."""
    for number, part in enumerate(path):
        if isinstance(content, str):
            return None, False
        try:
            inner = content[part]
        except (LookupError, TypeError):
            return None, False
        if isinstance(inner, str) and number + 1 < len(path):
            parse = parse_list if isinstance(path[number + 1], int) else parse_mapping
            with contextlib.suppress(ValueError):
                inner = content[part] = parse(inner)
        content = inner
    return content, True


def _remove(content: Any, path: KeyPath) -> bool:
    """Remove the innermost existing value on the path, in place. Return False if that is the whole content."""
    while path and not _find(content, path)[1]:
        path = path[:-1]
    if not path:
        return False
    container, _ = _find(content, path[:-1])
    if isinstance(container, abc.MutableMapping):
        del container[path[-1]]
    else:  # keep the indices of the others
        container[path[-1]] = {"name": PLACEHOLDER, "id": f"{PLACEHOLDER}{path[-1]}"}
    return True


def _copied(content: Any) -> Any:
    if isinstance(content, abc.Mapping):
        return {key: _copied(value) for key, value in content.items()}
    return [_copied(value) for value in content] if isinstance(content, list | tuple) else content
