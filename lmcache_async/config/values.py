"""The typed leaves of the config: strict about meaning, human about spelling.

Each parser takes what YAML, JSON or an environment variable gives and raises ValueError that says
what is expected. The annotated types under them are for pydantic fields, a tier's own config too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from lmcache_async.config.sizes import parse_size
from lmcache_async.config.yaml_text import YAMLTextError, read_yaml

MAX_COUNT = 10**18 - 1
MAX_SECONDS = 1e9
"""Some 31 years. A thread cannot wait for more than about ten times as long."""

MAX_RATE = 1e12

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


def parse_flag(value: object) -> bool:
    """A boolean: true, yes, on, 1 or false, no, off, 0 in any case; nothing else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | str):
        text = str(value).strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
    raise ValueError("expected true or false (also yes/no, on/off, 1/0)")


def parse_count(value: object) -> int:
    """A whole number of at least 1."""
    count = _whole_or_none(value)
    if count is None or count < 1:
        raise ValueError("expected a whole number of at least 1")
    return _bounded(count)


def parse_seed(value: object) -> int:
    """What a random generator starts from: a whole number, 0 or more."""
    seed = _whole_or_none(value)
    if seed is None or seed < 0:
        raise ValueError("expected a whole number of at least 0")
    return _bounded(seed)


def parse_number(value: object) -> float:
    """A finite number; booleans are none."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer above all floats
        pass
    raise ValueError("expected a number")


def parse_rate(value: object) -> float:
    """Something a second, above 0."""
    rate = _number_or_nan(value)
    if not 0 < rate <= MAX_RATE:
        raise ValueError(f"expected a number above 0 and at most {MAX_RATE:.0f}")
    return rate


def parse_seconds(value: object) -> float:
    """A time in seconds, above 0."""
    seconds = _number_or_nan(value)
    if not seconds > 0:
        raise ValueError("expected a number of seconds above 0")
    return _bounded_seconds(seconds)


def parse_wait(value: object) -> float:
    """A time in seconds, where 0 is "do not wait"."""
    seconds = _number_or_nan(value)
    if not seconds >= 0:
        raise ValueError("expected a number of seconds, 0 or more")
    return _bounded_seconds(seconds)


def parse_fraction(value: object) -> float:
    fraction = _number_or_nan(value)
    if not 0 < fraction <= 1:
        raise ValueError("expected a fraction above 0 and at most 1")
    return fraction


def parse_probability(value: object) -> float:
    probability = _number_or_nan(value)
    if not 0 <= probability <= 1:
        raise ValueError("expected a probability from 0 to 1")
    return probability


def parse_list(value: object) -> list[Any]:
    """A list, also as text: JSON (`["a", "b"]`) or names between commas (`a, b`)."""
    if isinstance(value, str):
        value = _read_flow(value, "[") if value.lstrip().startswith("[") else value.split(",")
        if isinstance(value, list):
            value = [item.strip() if isinstance(item, str) else item for item in value]
    if not isinstance(value, list | tuple):
        raise ValueError('expected a list, such as ["a", "b"]')  # noqa: TRY004 - pydantic reads ValueError
    return list(value)


def parse_mapping(value: object) -> dict[str, Any]:
    """A mapping, also as JSON text."""
    if isinstance(value, str):
        value = _read_flow(value, "{")
    if not isinstance(value, Mapping):
        raise ValueError('expected a mapping, such as {"key": "value"}')  # noqa: TRY004 - as above
    return {str(key): item for key, item in value.items()}


def parse_name(value: object) -> str:
    """A name of letters, digits, `_`, `.` and `-`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("expected a name of letters, digits, '_', '.' and '-'")
    return value


def parse_names(value: object) -> tuple[str, ...]:
    """At least one name."""
    names = tuple(parse_name(item) for item in parse_list(value))
    if not names:
        raise ValueError("expected at least one name")
    return names


def check_socket(path: Path) -> Path:
    """A path that a Unix socket can have, as far as one sees from the path."""
    try:
        usable = bool(path.name) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ValueError("expected the path of a socket, such as /run/kv/host.sock")
    return path


def unless_none(value: object) -> object:
    """Texts that mean "not set" become None."""
    return None if isinstance(value, str) and value.strip().lower() in {"", "none", "null"} else value


def expand_home(text: str | Path) -> Path:
    """The path, with what its `~` stands for. Messages do not show it: it may be a secret, meant for another key."""
    if "\0" in str(text):
        raise ValueError("expected a path without null characters")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # which pydantic lets through
        raise ValueError("expected a path; there is no home for its ~ on this machine") from None


def _whole_or_none(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,400}", value.strip(), re.ASCII):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bounded(number: int) -> int:
    if number > MAX_COUNT:
        raise ValueError(f"expected a whole number of at most {MAX_COUNT}")
    return number


def _bounded_seconds(seconds: float) -> float:
    if seconds > MAX_SECONDS:
        raise ValueError(f"expected a number of seconds of at most {MAX_SECONDS:.0f}")
    return seconds


def _number_or_nan(value: object) -> float:
    try:
        return parse_number(value)
    except ValueError:
        return math.nan


def _read_flow(text: str, opening: str) -> object:
    """JSON, or YAML's flow form of it; None where it is neither."""
    if not text.lstrip().startswith(opening):
        return None
    try:
        return read_yaml(text)[0]
    except YAMLTextError:
        return None


# What may be written, for JSON schemas: the parsers above take more spellings, none of another meaning.
FlagText = Literal["true", "yes", "on", "1", "false", "no", "off", "0"]
NoneText = Literal["", "none", "null"]
NumberText = Annotated[str, Field(pattern=r"^\s*[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?\s*$")]
CountInput = (
    Annotated[int, Field(ge=1, le=MAX_COUNT)]
    | Annotated[str, Field(pattern=r"^\s*0{0,17}[1-9][0-9]{0,17}\s*$")]
)
SizeInput = (
    Annotated[int, Field(ge=1)]
    | Annotated[
        str,
        Field(pattern=r"^\s*([0-9]+|([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*([kKmMgGtT]([iI][bB]?|[bB])|[bB]))\s*$"),
    ]
)
SeedInput = Annotated[int, Field(ge=0, le=MAX_COUNT)] | Annotated[str, Field(pattern=r"^\s*[0-9]{1,18}\s*$")]
RateInput = Annotated[float, Field(gt=0, le=MAX_RATE)] | NumberText
SecondsInput = Annotated[float, Field(gt=0, le=MAX_SECONDS)] | NumberText
WaitInput = Annotated[float, Field(ge=0, le=MAX_SECONDS)] | NumberText
FractionInput = Annotated[float, Field(gt=0, le=1)] | NumberText
ProbabilityInput = Annotated[float, Field(ge=0, le=1)] | NumberText
NameText = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
NameList = Annotated[list[NameText], Field(min_length=1)]
NamesText = Annotated[str, Field(pattern=r"^[A-Za-z0-9_ ,.-]+$")]


def _parse_optional_rate(value: object) -> float | None:
    value = unless_none(value)
    return None if value is None else parse_rate(value)


def _parse_optional_seed(value: object) -> int | None:
    value = unless_none(value)
    return None if value is None else parse_seed(value)


def _parse_optional_size(value: object) -> int | None:
    value = unless_none(value)
    return None if value is None else parse_size(value)


Flag = Annotated[bool, BeforeValidator(parse_flag, json_schema_input_type=bool | FlagText)]
Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=CountInput)]
Size = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=SizeInput)]
OptionalSize = Annotated[
    int | None, BeforeValidator(_parse_optional_size, json_schema_input_type=SizeInput | NoneText | None)
]
Seed = Annotated[int, BeforeValidator(parse_seed, json_schema_input_type=SeedInput)]
OptionalSeed = Annotated[
    int | None, BeforeValidator(_parse_optional_seed, json_schema_input_type=SeedInput | NoneText | None)
]
OptionalRate = Annotated[
    float | None,
    BeforeValidator(_parse_optional_rate, json_schema_input_type=RateInput | NoneText | None),
]
Seconds = Annotated[float, BeforeValidator(parse_seconds, json_schema_input_type=SecondsInput)]
Wait = Annotated[float, BeforeValidator(parse_wait, json_schema_input_type=WaitInput)]
Fraction = Annotated[float, BeforeValidator(parse_fraction, json_schema_input_type=FractionInput)]
Probability = Annotated[float, BeforeValidator(parse_probability, json_schema_input_type=ProbabilityInput)]
Name = Annotated[str, BeforeValidator(parse_name, json_schema_input_type=NameText)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names, json_schema_input_type=NameList | NamesText)]
SocketPath = Annotated[Path, AfterValidator(check_socket)]
