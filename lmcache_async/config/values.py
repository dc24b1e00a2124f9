"""Types of configuration values: flags, counts, sizes, times, names, lists, endpoints.

Each parser accepts values of YAML, JSON and environment variables. It raises a ValueError that says what is
expected. The annotated types at the end are for fields of pydantic models, including those of tiers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lmcache_async.config.files import YAMLTextError, read_yaml

MAX_COUNT = 10**18 - 1
MAX_SECONDS = 1e9
"""About 31 years, a ninth of the longest wait of a thread (`threading.TIMEOUT_MAX`)."""

MAX_RATE = 1e12

MAX_SOCKET_PATH_BYTES = 100
"""Maximum length of a Unix socket's path. sockaddr_un has room for 107 bytes."""

_FLAGS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)

UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power, f"{_letter}i": 1024**_power}
MAX_BYTES = 2**62  # sums stay below 64 bits

_EXPECTED_LIST = 'expected a list, such as ["a", "b"]'
_EXPECTED_MAPPING = 'expected a mapping, such as {"key": "value"}'
_EXPECTED_SIZE = "expected a size in bytes, such as 8GiB, 500MB or 1048576"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a server: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_flag(value: object) -> bool:
    """Parse true, yes, on, 1 or false, no, off, 0, in any case."""
    text = str(value).strip().lower()
    if not isinstance(value, int | str) or text not in _FLAGS:
        raise ValueError("expected true or false (also yes/no, on/off, 1/0)")
    return _FLAGS[text]


def whole_parser(least: int) -> Callable[[object], int]:
    """Return a parser of the whole numbers from `least` to `MAX_COUNT`."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,400}", value.strip(), re.ASCII):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"expected a whole number of at least {least}")
        if value > MAX_COUNT:
            raise ValueError(f"expected a whole number of at most {MAX_COUNT}")
        return value

    return parse


parse_count = whole_parser(1)
parse_seed = whole_parser(0)


def parse_number(value: object) -> float:
    """Parse a finite number; booleans are refused."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # no number, or larger than any float
            if math.isfinite(number := float(value)):
                return number
    raise ValueError("expected a number")


def number_parser(
    expected: str, accepts: Callable[[float], bool], most: float = math.inf
) -> Callable[[object], float]:
    """Return a parser of the numbers that `accepts` accepts, up to `most`."""

    def parse(value: object) -> float:
        try:
            number = parse_number(value)
        except ValueError:
            number = math.nan
        if not accepts(number):
            raise ValueError(f"expected {expected}")
        if number > most:
            raise ValueError(f"expected a number of seconds of at most {most:.0f}")
        return number

    return parse


parse_rate = number_parser(f"a number above 0 and at most {MAX_RATE:.0f}", lambda rate: 0 < rate <= MAX_RATE)
parse_seconds = number_parser("a number of seconds above 0", lambda seconds: seconds > 0, MAX_SECONDS)
parse_wait = number_parser("a number of seconds, 0 or more", lambda seconds: seconds >= 0, MAX_SECONDS)
parse_fraction = number_parser("a fraction above 0 and at most 1", lambda fraction: 0 < fraction <= 1)
parse_probability = number_parser("a probability from 0 to 1", lambda probability: 0 <= probability <= 1)


def parse_list(value: object) -> list[Any]:
    """Parse a list, or its text as JSON (`["a", "b"]`) or separated by commas (`a, b`)."""
    if isinstance(value, str):
        value = _read_flow(value, _EXPECTED_LIST) if value.lstrip().startswith("[") else value.split(",")
        if isinstance(value, list):
            value = [item.strip() if isinstance(item, str) else item for item in value]
    if not isinstance(value, list | tuple):
        raise ValueError(_EXPECTED_LIST)  # noqa: TRY004 - pydantic reads ValueError
    return list(value)


def parse_mapping(value: object) -> dict[str, Any]:
    """Parse a mapping, or its text as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _read_flow(value, _EXPECTED_MAPPING)
    if not isinstance(value, Mapping):
        raise ValueError(_EXPECTED_MAPPING)  # noqa: TRY004 - as above
    return {str(key): item for key, item in value.items()}


def parse_name(value: object) -> str:
    """Parse a name of letters, digits, `_`, `.` and `-`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("expected a name of letters, digits, '_', '.' and '-'")
    return value


def parse_names(value: object) -> tuple[str, ...]:
    """Parse a list of at least one name."""
    names = tuple(parse_name(item) for item in parse_list(value))
    if not names:
        raise ValueError("expected at least one name")
    return names


def parse_user(value: object) -> int:
    """Parse the id of a user."""
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,10}", str(value), re.ASCII):
        raise ValueError("expected a user id, such as 1000")
    return int(str(value))


def expand_socket(path: Path) -> Path:
    """Expand `~`, and refuse a path that cannot be that of a Unix socket."""
    if not path.name or not _is_encodable(path):
        raise ValueError("expected the path of a socket, such as /run/kv/host.sock")
    path = expand_home(path)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"expected a path of at most {MAX_SOCKET_PATH_BYTES} bytes, the limit of sockets")
    return path


def parse_size(value: object) -> int:
    """Parse a size such as `8GiB`, `500MB`, `0.5 GiB` or 1048576 to whole bytes, at least 1.

    `KB MB GB TB` are powers of 1000, `KiB MiB GiB TiB` and `Ki Mi Gi Ti` powers of 1024, in any case. A number
    without a unit is in bytes. A fraction of a byte is dropped.

    Raises:
        ValueError: The value is not a size. The message says what is expected.
    """
    if isinstance(value, float) and value.is_integer():  # YAML's 1.0e9
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(_EXPECTED_SIZE)  # noqa: TRY004 - pydantic reads ValueError
    match = _SIZE.fullmatch(str(value).strip().lower())
    if match is None:
        raise ValueError(_EXPECTED_SIZE)
    number, unit = match.groups()
    if unit in {"k", "m", "g", "t"}:
        raise ValueError(f"expected {unit.upper()}iB (1024) or {unit.upper()}B (1000) as the unit")
    if (unit or "b") not in UNITS or (not unit and "." in number):
        raise ValueError(_EXPECTED_SIZE)
    # Decimal's 28 digits are exact up to MAX_BYTES.
    size = int(Decimal(number) * UNITS[unit or "b"])
    if not 1 <= size <= MAX_BYTES:
        raise ValueError(f"expected a size between 1 byte and {format_size(MAX_BYTES)}")
    return size


def parse_size_or_zero(value: object) -> int:
    """Parse a size as `parse_size` does, or 0."""
    # Not `in` a set, which raises TypeError for a list.
    return 0 if value in (0, "0") and value is not False else parse_size(value)


def format_size(nbytes: int) -> str:
    """Format a size in the largest binary unit with a whole number. `parse_size` is the inverse."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power} {unit}"
    return f"{nbytes} B"


def parse_endpoint(text: str, port: int | None = None) -> Endpoint:
    """Parse `name:port` or `[address]:port`."""
    try:
        parts = urlsplit(f"x://{text.strip()}")
        host, given = parts.hostname, port if parts.port is None else parts.port
    except ValueError:
        host, given = None, None
    if not host or given is None or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        what = "name:port or [address]:port" if port is None else "name, name:port or [address]:port"
        raise ValueError(f"expected {what}")
    return Endpoint(host, given)


def parse_listen(value: object) -> Endpoint:
    """Parse the `host:port` to listen on."""
    if isinstance(value, Endpoint):
        return value
    if not isinstance(value, str):
        raise ValueError("expected host:port, such as 127.0.0.1:7420")  # noqa: TRY004 - pydantic reads ValueError
    return parse_endpoint(value)


def is_loopback(host: str) -> bool:
    """Whether the address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unless_none(value: object) -> object:
    """Return None for texts that mean "not set", else the value."""
    return None if isinstance(value, str) and value.strip().lower() in {"", "none", "null"} else value


def expand_home(value: object) -> Path:
    """Parse a path and expand its `~`. Messages do not contain the path, which may be a misplaced secret."""
    if not isinstance(value, str | Path):
        raise ValueError("expected a path")  # noqa: TRY004 - pydantic reads ValueError
    if not _is_encodable(value):
        raise ValueError("expected a path without null characters or invalid Unicode")
    try:
        return Path(value).expanduser()
    except RuntimeError:  # pydantic would not handle it
        raise ValueError("expected a path; its ~ has no home directory on this machine") from None


def _is_encodable(path: str | Path) -> bool:
    """Whether the operating system accepts the characters of a path."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _read_flow(text: str, expected: str) -> object:
    """Parse JSON or the flow style of YAML. The error does not contain YAML's own message, which may show a secret."""
    try:
        return read_yaml(text)[0]
    except YAMLTextError:
        raise ValueError(f"{expected}; the text is not valid JSON or YAML") from None


# Input types for JSON schemas. The parsers above accept some more spellings.
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
NameText = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
_SeedInput = Annotated[int, Field(ge=0, le=MAX_COUNT)] | Annotated[str, Field(pattern=r"^\s*[0-9]{1,18}\s*$")]
_NamesInput = (
    Annotated[list[NameText], Field(min_length=1)] | Annotated[str, Field(pattern=r"^[A-Za-z0-9_ ,.-]+$")]
)


def _by(parse: Callable[[object], Any], form: Any) -> BeforeValidator:
    """Return a validator that parses a value; `form` is the type of its input in JSON schemas."""
    return BeforeValidator(parse, json_schema_input_type=form)


def _number(parse: Callable[[object], float], bounds: Any) -> BeforeValidator:
    return _by(parse, Annotated[float, bounds] | NumberText)


Flag = Annotated[bool, _by(parse_flag, bool | FlagText)]
Count = Annotated[int, _by(parse_count, CountInput)]
OptionalCount = Annotated[Count | None, _by(unless_none, CountInput | NoneText | None)]
Size = Annotated[int, _by(parse_size, SizeInput)]
SizeOrZero = Annotated[int, _by(parse_size_or_zero, SizeInput | Literal[0, "0"])]
OptionalSize = Annotated[Size | None, _by(unless_none, SizeInput | NoneText | None)]
UserId = Annotated[int, _by(parse_user, CountInput | Literal[0, "0"])]
OptionalUserId = Annotated[UserId | None, BeforeValidator(unless_none)]
Seed = Annotated[int, _by(parse_seed, _SeedInput)]
OptionalSeed = Annotated[Seed | None, _by(unless_none, _SeedInput | NoneText | None)]
OptionalRate = Annotated[
    Annotated[float, BeforeValidator(parse_rate)] | None,
    _by(unless_none, Annotated[float, Field(gt=0, le=MAX_RATE)] | NumberText | NoneText | None),
]

Seconds = Annotated[float, _number(parse_seconds, Field(gt=0, le=MAX_SECONDS))]
OptionalSeconds = Annotated[Seconds | None, BeforeValidator(unless_none)]
Wait = Annotated[float, _number(parse_wait, Field(ge=0, le=MAX_SECONDS))]
Fraction = Annotated[float, _number(parse_fraction, Field(gt=0, le=1))]
Probability = Annotated[float, _number(parse_probability, Field(ge=0, le=1))]
Name = Annotated[str, _by(parse_name, NameText)]
Names = Annotated[tuple[str, ...], _by(parse_names, _NamesInput)]
SocketPath = Annotated[Path, AfterValidator(expand_socket)]
OptionalPath = Annotated[Annotated[Path, BeforeValidator(expand_home)] | None, BeforeValidator(unless_none)]
