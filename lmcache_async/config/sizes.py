"""Sizes in bytes as people write them: `8GiB`, `500MB`, `0.5 GiB`, 1048576."""

from __future__ import annotations

import re
from decimal import Decimal

UNITS = {
    "b": 1,
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
    **{
        unit: 1024**power for power, unit in enumerate(("ki", "mi", "gi", "ti"), start=1)
    },  # Kubernetes' spelling
}
MAX_BYTES = 2**62  # beyond any machine; keeps every later sum inside 64 bits

_EXPECTED = "expected a size in bytes, such as 8GiB, 500MB or 1048576"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)", re.ASCII)


def parse_size(value: object) -> int:
    """A size in whole bytes, at least 1; a fraction of a byte is dropped.

    `KB MB GB TB` are powers of 1000, `KiB MiB GiB TiB` (and `Ki Mi Gi Ti`) of 1024, in any case.
    A number without a unit is bytes.

    Raises:
        ValueError: It is no size; the text says what is expected.
    """
    if isinstance(value, float) and value.is_integer():  # YAML's 1.0e9
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(_EXPECTED)  # noqa: TRY004 - pydantic reads ValueError
    match = _SIZE.fullmatch(str(value).strip().lower())
    if match is None:
        raise ValueError(_EXPECTED)
    number, unit = match.groups()
    if unit in {"k", "m", "g", "t"}:
        raise ValueError(f"expected {unit.upper()}iB (1024) or {unit.upper()}B (1000) as the unit")
    if (unit or "b") not in UNITS or (not unit and "." in number):
        raise ValueError(_EXPECTED)
    # Enough digits are kept: Decimal's own 28 only matter beyond MAX_BYTES.
    size = int(Decimal(number) * UNITS[unit or "b"])
    if not 1 <= size <= MAX_BYTES:
        raise ValueError(f"expected a size between 1 byte and {format_size(MAX_BYTES)}")
    return size


def format_size(nbytes: int) -> str:
    """The size in the largest binary unit that gives a whole number; `parse_size` reads it back."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power} {unit}"
    return f"{nbytes} B"
