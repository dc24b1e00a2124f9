"""Parsing and formatting of sizes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import format_size, parse_size
from lmcache_async.config.values import MAX_BYTES

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "Gi": 2**30}
EXPECTED = "expected a size in bytes, such as 8GiB, 500MB or 1048576"


@given(st.integers(1, MAX_BYTES))
def test_parsing_is_the_inverse_of_formatting(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(1, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_a_number_times_its_unit(number, unit, space, upper):
    text = f"{number}{space}{unit}"

    assert parse_size(text.upper() if upper else text) == number * UNITS[unit]


@given(st.integers(1, MAX_BYTES))
def test_a_number_without_a_unit_is_bytes(nbytes):
    assert parse_size(nbytes) == parse_size(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("0.5 GiB", 2**29),
        ("1.5KB", 1500),
        (".5 MiB", 2**19),
        ("1.0001 KiB", 1024),
        (1e9, 10**9),
        (" 8gib ", 2**33),
    ],
)
def test_fractions_and_spaces(value, nbytes):
    assert parse_size(value) == nbytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "abc", "8 GiBs", "1e9", "-1", "-1GiB", "1.5", 1.5, True, None, [], "1,5GiB", "٣GiB"]
)
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=f"^{re.escape(EXPECTED)}$"):
        parse_size(value)


def test_an_ambiguous_unit_is_refused():
    with pytest.raises(ValueError, match=r"^expected GiB \(1024\) or GB \(1000\) as the unit$"):
        parse_size("8G")


@pytest.mark.parametrize("value", [0, "0GiB", "0.1B", MAX_BYTES + 1, "5000000TiB", "9" * 400 + "GiB"])
def test_sizes_beyond_the_bounds_are_refused(value):
    with pytest.raises(ValueError, match=r"^expected a size between 1 byte and 4194304 TiB$"):
        parse_size(value)
