"""Parsers of configuration values, and the files and paths that a configuration names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import EngineConfig, format_size, parse_size, values
from lmcache_async.config.files import read_bounded
from lmcache_async.daemon.config import DaemonConfig

TRUE, FALSE = ["true", "yes", "on", "1"], ["false", "no", "off", "0"]


@given(st.sampled_from(TRUE + FALSE), st.sampled_from([str.lower, str.upper, str.title]))
def test_booleans_are_parsed_in_each_spelling_and_case(text, case):
    assert values.parse_flag(f" {case(text)} ") is (text in TRUE)


@given(st.text(), st.sampled_from(["", "t", "2", "enabled"]))
def test_no_other_text_is_a_boolean(text, also):
    for candidate in (text, also):
        if candidate.strip().lower() not in TRUE + FALSE:
            with pytest.raises(ValueError, match="expected true or false"):
                values.parse_flag(candidate)


@given(st.integers(1, 10**17))
def test_counts_are_whole_numbers_or_their_text(number):
    assert values.parse_count(number) == values.parse_count(f" {number} ") == number


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_seconds_are_numbers_or_their_text(seconds):
    assert values.parse_seconds(seconds) == values.parse_seconds(str(seconds)) == seconds


REFUSED = [
    (values.parse_flag, [None, 2, 1.0, [], "maybe"], "expected true or false (also yes/no, on/off, 1/0)"),
    (
        values.parse_count,
        [0, -1, 1.0, True, "1.5", "abc", "", None, "1" * 401],
        "expected a whole number of at least 1",
    ),
    (
        values.parse_count,
        [10**18, 10**30, 10**400, "1" * 19],
        "expected a whole number of at most 999999999999999999",
    ),
    (values.parse_seed, [-1, 1.0, True, "abc", None], "expected a whole number of at least 0"),
    (values.parse_seed, [10**18], "expected a whole number of at most 999999999999999999"),
    (values.parse_number, ["abc", True, None, "nan", float("inf"), [], 10**400], "expected a number"),
    (
        values.parse_rate,
        [0, -1, True, None, "nan", 1e13],
        "expected a number above 0 and at most 1000000000000",
    ),
    (
        values.parse_seconds,
        [0, -1, "abc", True, None, "nan", "inf", "10s"],
        "expected a number of seconds above 0",
    ),
    (values.parse_wait, [-1, "abc", True, None, "nan", "inf"], "expected a number of seconds, 0 or more"),
    (values.parse_seconds, [1e10, "1e300"], "expected a number of seconds of at most 1000000000"),
    (values.parse_wait, [1e10, "1e300"], "expected a number of seconds of at most 1000000000"),
    (values.parse_fraction, [0, 1.01, "abc", True, None], "expected a fraction above 0 and at most 1"),
    (values.parse_list, [None, 3, {"a": 1}], 'expected a list, such as ["a", "b"]'),
    (
        values.parse_list,
        ["[1", "[1]x"],
        'expected a list, such as ["a", "b"]; the text is not valid JSON or YAML',
    ),
    (values.parse_mapping, [None, 3, [1], "a: 1"], 'expected a mapping, such as {"key": "value"}'),
    (
        values.parse_mapping,
        ["{"],
        'expected a mapping, such as {"key": "value"}; the text is not valid JSON or YAML',
    ),
    (
        values.parse_name,
        [None, 3, "", "a b", "-a", "a/b"],
        "expected a name of letters, digits, '_', '.' and '-'",
    ),
    (values.parse_names, [[], "[]"], "expected at least one name"),
    (
        parse_size,
        ["", "GiB", "abc", "8 GiBs", "1e9", "-1", "-1GiB", "1.5", 1.5, True, None, [], "1,5GiB", "٣GiB"],
        "expected a size in bytes, such as 8GiB, 500MB or 1048576",
    ),
    (parse_size, ["8G"], "expected GiB (1024) or GB (1000) as the unit"),
    (
        parse_size,
        [0, "0GiB", "0.1B", values.MAX_BYTES + 1, "5000000TiB", "9" * 400 + "GiB"],
        "expected a size between 1 byte and 4194304 TiB",
    ),
]


@pytest.mark.parametrize(
    ("parse", "value", "message"), [(parse, value, text) for parse, many, text in REFUSED for value in many]
)
def test_an_invalid_value_is_refused_with_the_expected_one(parse, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(value)


ACCEPTED = [
    (values.parse_flag, [True, 1], True),
    (values.parse_flag, [False, 0], False),
    (values.parse_wait, [0, "0"], 0.0),
    (values.parse_wait, [0.2], 0.2),
    (
        values.parse_names,
        [["hash", "write"], ("hash", "write"), "hash, write", '["hash", "write"]'],
        ("hash", "write"),
    ),
    (values.unless_none, ["none", "None", "null", " ", ""], None),
    (parse_size, ["0.5 GiB"], 2**29),
    (parse_size, ["1.5KB"], 1500),
    (parse_size, [".5 MiB"], 2**19),
    (parse_size, ["1.0001 KiB"], 1024),
    (parse_size, [1e9], 10**9),
    (parse_size, [" 8gib "], 2**33),
]


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [(parse, value, result) for parse, many, result in ACCEPTED for value in many],
)
def test_a_valid_value_is_accepted_in_each_form(parse, value, expected):
    result = parse(value)

    assert (result, type(result)) == (expected, type(expected))


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "Gi": 2**30}


@given(st.integers(1, values.MAX_BYTES))
def test_parsing_is_the_inverse_of_formatting(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(1, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_a_number_times_its_unit(number, unit, space, upper):
    text = f"{number}{space}{unit}"

    assert parse_size(text.upper() if upper else text) == number * UNITS[unit]


@given(st.integers(1, values.MAX_BYTES))
def test_a_number_without_a_unit_is_bytes(nbytes):
    assert parse_size(nbytes) == parse_size(str(nbytes)) == nbytes


def test_a_refused_directory_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 10)

    assert tmp_path not in [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]


def test_a_home_is_expanded_in_the_paths_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    engine = EngineConfig.model_validate({"vllm": {"socket_dir": "~/kv"}})
    daemon = DaemonConfig.model_validate({"socket": "~/kv.sock", "max_bytes": "1GiB"})

    assert engine.vllm.socket_dir == Path("/home/me/kv")
    assert daemon.socket == Path("/home/me/kv.sock")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_file(name: str) -> None:
    with pytest.raises(OSError, match="null character or invalid Unicode"):
        read_bounded(Path(name), 10)
    with pytest.raises(ValueError, match="without null characters or invalid Unicode"):
        EngineConfig.model_validate({"hash_key_file": name})
