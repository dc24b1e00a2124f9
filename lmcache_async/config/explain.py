"""From what is wrong to a message that says where, which key, which value, what is expected, what is near."""

from __future__ import annotations

import difflib
import re
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ModelT = TypeVar("ModelT", bound=BaseModel)
KeyPath: TypeAlias = tuple[str | int, ...]

_SECRET = re.compile(
    r"password|passwd|secret|(?<!max_)(?<!generated_)token(?!s_per)|credential|api_?key|^hash_key$"
    r"|^encryption(\.keys)?$",
    re.IGNORECASE,
)
_NAMES_A_SECRET = re.compile(r"_(file|variable)$")


EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a number of fewer digits",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:g}",
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
"""What a value should have been, by pydantic's name of the error; of others its own words are told."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from.

    Attributes:
        name: The file's path, the variable's name or `kv_connector_extra_config`.
        lines: In a file, the line of each key.
        variable_prefix: For a variable, the prefix of its kind, so that a hint is spelled as a variable too.
    """

    name: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    variable_prefix: str = ""

    def at(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            part = path[:length]
            dotted = (".".join(str(key) for key in part),)
            if line := self.lines.get(part) or self.lines.get(dotted):
                return f"{self.name}, line {line}"
        return self.name

    def spell(self, key: str) -> str:
        return self.variable_prefix + key.upper().replace(".", "__") if self.variable_prefix else key


def spell_path(path: KeyPath) -> str:
    """`("tiers", 1, "path")` as `tiers[1].path`; what cannot be printed is escaped."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def known_keys(model: type[BaseModel]) -> list[str]:
    """Every key of the model in dotted form, sections' keys too."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(name)
        for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):  # also one that may be none
            if isinstance(kind, type) and issubclass(kind, BaseModel) and not _is_mapping(info.annotation):
                keys += [f"{name}.{key}" for key in known_keys(kind)]
    return keys


def _is_mapping(annotation: Any) -> bool:
    return isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), abc.Container)


def nearest(text: str, choices: Iterable[str]) -> str | None:
    """The choice that `text` was most likely meant to be; None where none is near."""
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
    """Whether what the key holds is for nobody's eyes; the name of a file or a variable that holds it is not."""
    return bool(_SECRET.search(key)) and not _NAMES_A_SECRET.search(key)


def without_secrets(value: object, name: str = "") -> object:
    """The value with `***` in place of whatever a name in it says is secret; `name` is its own.

    None, true, false and what is empty tell nothing and stay.
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
    """The text without users and passwords in URLs."""
    return re.sub(r"//[^/@\s'\"]+@", "//***@", text)


def show(value: object, key: str = "") -> str:
    """The value for a message: short, and without what must stay secret."""
    if _SECRET.search(key):
        return "'***'"
    text = without_user(repr(without_secrets(value)))
    return text if len(text) <= 120 else f"{text[:117]}..."


def disagree(message: str, *keys: str) -> PydanticCustomError:
    """An error for values that are right alone and wrong together; `keys` from the model's own level."""
    return PydanticCustomError("disagree", "{message}", {"message": message, "keys": keys})


def explain(
    error: ValidationError,
    keys: Sequence[str],
    origins: Mapping[KeyPath, Origin],
    default: Origin,
) -> ConfigError:
    """The ConfigError for pydantic's error, a line for each thing that is wrong; `keys` are those there are."""
    details = error.errors(include_url=False)
    return ConfigError("\n".join(_explain_one(one, keys, origins, default) for one in details))


def validate_options(
    config_type: type[ModelT],
    options: Mapping[str, Any],
    where: str,
    *,
    beside: Sequence[str] = ("id", "timeout_s", "layers"),
) -> ModelT:
    """A tier's or a layer's options as its config type.

    Args:
        config_type: The type.
        options: What the config gives.
        where: Where it gives it.
        beside: Keys that stand beside the options, one of which may have been meant.

    Raises:
        ConfigError: As for the config itself, with `where` as the place.
    """
    try:
        return config_type.model_validate(dict(options))
    except ValidationError as error:
        keys = [*known_keys(config_type), *beside]
        raise explain(error, keys, {}, Origin(where)) from None


def unknown_key(origin: Origin, path: KeyPath, choices: Iterable[str]) -> str:
    """What to say of a key that is none of `choices` (dotted keys)."""
    key = spell_path(path)
    choice = nearest(key, choices)
    return f"{origin.at(path)}: there is no key {key}{hint(choice and origin.spell(choice))}"


def _explain_one(
    details: ErrorDetails, keys: Sequence[str], origins: Mapping[KeyPath, Origin], default: Origin
) -> str:
    path, context = tuple(details["loc"]), details.get("ctx", {})
    if details["type"] == "disagree":
        paths = [path + tuple(part for part in key.split(".") if part) for key in context["keys"]]
        path = next((path for path in paths if _origin(path, origins)), paths[0])
        return f"{(_origin(path, origins) or default).at(path)}: {spell_path(path)}: {context['message']}"
    origin = _origin(path, origins) or default
    if details["type"] in {"extra_forbidden", "invalid_key"}:
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
    """What should have been there, in the words of our own validators."""
    if (form := EXPECTED.get(kind)) is not None:
        return f"expected {form.format(**context)}"
    return message.removeprefix("Value error, ").replace("Input should be", "expected", 1)


def _origin(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    for length in range(len(path), 0, -1):
        if origin := origins.get(path[:length]):
            return origin
    return None
