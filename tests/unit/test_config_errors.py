"""Error messages of the configuration: place, key, value, expected value and nearest key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from lmcache_async.config import Flag, Size, load_config, validate_options
from lmcache_async.errors import ConfigError

EXTRA = "kv_connector_extra_config"
STAGE = "expected a name of letters, digits, '_', '.' and '-'"


def message(**sources) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"env": {}, **sources})
    assert not isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"chunk_sise": 1}, "there is no key chunk_sise; did you mean chunk_size?"),
        ({"max_bytes": 1}, "there is no key max_bytes; did you mean arena.max_bytes?"),
        ({"arena.max_byts": 1}, "there is no key arena.max_byts; did you mean arena.max_bytes?"),
        ({"zzz": 1}, "there is no key zzz"),
        ({7: 1}, "there is no key 7"),
        ({"local_cpu": 1}, "there is no key local_cpu; it is a key of LMCache; use tiers"),
        ({"tiers.disk": 1}, "tiers is not a section, so it has no key disk"),
        ({"arena": {"prefault": 1}, "arena.prefault": 0}, "arena.prefault is given twice"),
        ({"arena": 3}, 'arena is 3: expected a mapping, such as {"key": "value"}'),
        ({"config_file": 3}, "config_file is 3: expected a path"),
        ({"chunk_size": 0}, "chunk_size is 0: expected a whole number of at least 1"),
        ({"weights_fingerprint": "text:"}, "weights_fingerprint is 'text:': expected sampled, full or text:<your own name of the weights>"),
        ({"arena": {"max_bytes": "8G"}}, "arena.max_bytes is '8G': expected GiB (1024) or GB (1000) as the unit"),
        ({"tiers": []}, "tiers is []: expected at least one tier"),
        ({"tiers": [3]}, "tiers[0] is 3: expected a tier's name, or a mapping with `name` and the tier's options"),
        ({"tiers": 3}, 'tiers is 3: expected a list, such as ["a", "b"]'),
        ({"tiers": [{"name": "cpu", "options": 3}]}, 'tiers[0].options is 3: expected a mapping, such as {"key": "value"}'),
        ({"tiers": ["cpu", "cpu"]}, "tiers[1].id: tiers[0] and tiers[1] both have the id 'cpu'; give one of them another `id`"),
        ({"store": {"stages": []}}, "store.stages is []: expected at least one name"),
        ({"store": {"stages": [{"a": 1}]}}, "store.stages is [{'a': 1}]: " + STAGE),
        ({"retrieve": {"max_in_flight_bytes": "1MiB"}}, "retrieve.max_in_flight_bytes: a batch of 32 MiB never fits into max_in_flight_bytes of 1 MiB"),
        ({"store.max_pending_write_bytes": "8GiB"}, "store.max_pending_write_bytes: 8 GiB of pending writes never fit into arena.max_bytes of 4 GiB"),
    ],
)  # fmt: skip
def test_an_invalid_mapping_is_reported(extra, text):
    assert message(extra=extra) == f"{EXTRA}: {text}"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("CHUNK_SISE", "1", "there is no key chunk_sise; did you mean LMCACHE_ASYNC_CHUNK_SIZE?"),
        ("ARENA__MAX_BYTE", "1", "there is no key arena.max_byte; did you mean LMCACHE_ASYNC_ARENA__MAX_BYTES?"),
        ("ARENA_MAX_BYTES", "1", "there is no key arena_max_bytes; did you mean LMCACHE_ASYNC_ARENA__MAX_BYTES?"),
        ("ARENA", "8GiB", "arena is '8GiB': expected a mapping, such as {\"key\": \"value\"}"),
        ("TIERS", '["cpu"', "tiers is '[\"cpu\"': expected a list, such as [\"a\", \"b\"]; the text is not valid JSON or YAML"),
    ],
)  # fmt: skip
def test_an_invalid_variable_is_reported(name, value, text):
    assert message(env={f"LMCACHE_ASYNC_{name}": value}) == f"LMCACHE_ASYNC_{name}: {text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("\nchunk_size: abc", "{file}, line 2: chunk_size is 'abc': expected a whole number of at least 1"),
        ("tiers:\n- cpu\n- name: disk\n  timeout_s: x", "{file}, line 4: tiers[1].timeout_s is 'x': expected a number of seconds above 0"),
        ("tiers:\n- {name: x, a: 1, options: {a: 1}}", "{file}, line 2: tiers[0].a: it is given twice, beside `options` and inside it"),
        ("chunk_size: 1\nchunk_size: 2", "{file}, line 2: chunk_size is given twice, first on line 1"),
        ("arena:\n  prefault: 1\n  prefault: 1", "{file}, line 3: arena.prefault is given twice, first on line 2"),
        ("a: [", "{file}, line 1: not YAML: expected the node content, but found '<stream end>'"),
        ("- a", "{file}: expected a mapping of keys to values, found ['a']"),
        ("local_cpu: true\nstore: {}\narena: {}", "{file}, line 1: there is no key local_cpu; it is a key of LMCache; use tiers"),
        ("arena: &a {max_bytes: *a}", "{file}, line 1: an alias contains itself"),
        ("arena: " + "[" * 60 + "]" * 60, "{file}, line 1: the text is nested too deeply"),
        ("arena: " + "[" * 5000 + "]" * 5000, "{file}, line 1: the text is nested too deeply"),
        ("a: [" + "1," * 20_000 + "]", "{file}, line 1: the text has more than 20000 values"),
        ("a: \x01", "{file}: not YAML: special characters are not allowed"),
        ("a: &a [" + "1," * 200 + "]\nb: &b [" + "*a," * 200 + "]", "{file}, line 2: the text expands to more than 20000 values"),
        ("a: &a [" + "1," * 200 + "]\nb: &b [" + "*a," * 50 + "]\nc: [*b, *b]", "{file}, line 3: the text expands to more than 20000 values"),
        ("a: !!python/object/apply:os.system [x]", "{file}, line 1: not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("chunk_size: x\nstore: {batch_bytes: y}", "{file}, line 1: chunk_size is 'x': expected a whole number of at least 1\n{file}, line 2: store.batch_bytes is 'y': expected a size in bytes, such as 8GiB, 500MB or 1048576"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_reported(tmp_path, content, text):
    file = tmp_path / "kv.yaml"
    file.write_text(content)

    assert message(path=file) == text.format(file=file)


def test_an_impossible_date_is_reported(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text("arena: 2026-13-01")

    text = f"{file}: a value cannot be read: month must be in 1..12"
    assert message(path=file).startswith(text)  # later versions of Python add the value


def test_aliases_and_merges_of_common_size_work(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text("store: &all {batch_bytes: 1MiB}\nretrieve: {<<: *all, verify_arena: true}\n")

    config = load_config(file, env={})

    assert config.store.batch_bytes == config.retrieve.batch_bytes == 1 << 20


def test_a_missing_file_is_reported_with_the_variable_that_names_it(tmp_path):
    file = tmp_path / "nope.yaml"
    text = f"the config file {file} cannot be read: No such file or directory"

    assert message(path=file) == text
    assert message(extra={"config_file": str(file)}) == f"{EXTRA}: config_file: {text}"
    assert message(env={"LMCACHE_ASYNC_CONFIG_FILE": str(file)}) == f"LMCACHE_ASYNC_CONFIG_FILE: {text}"
    assert message(env={"LMCACHE_CONFIG_FILE": str(file)}) == f"LMCACHE_CONFIG_FILE: {text}"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda file: file.write_bytes(b"#" * ((1 << 18) + 1)), "it has more than 262144 bytes"),
        (os.mkfifo, "it is not a regular file"),  # and not waited for
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "it is not UTF-8 text"),
    ],
    ids=["too large", "a pipe", "binary"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, make, text):
    file = tmp_path / "kv.yaml"
    make(file)

    assert message(path=file) == f"the config file {file} cannot be read: {text}"


def test_a_contradiction_is_reported_at_the_key_that_is_set(tmp_path):
    file = tmp_path / "kv.yaml"
    file.write_text("arena:\n  max_bytes: 1GiB\n")
    env = {"LMCACHE_ASYNC_STORE__MAX_PENDING_WRITE_BYTES": "2GiB"}

    assert message(path=file, env=env) == (
        "LMCACHE_ASYNC_STORE__MAX_PENDING_WRITE_BYTES: store.max_pending_write_bytes:"
        " 2 GiB of pending writes never fit into arena.max_bytes of 1 GiB"
    )


@pytest.mark.parametrize(
    "value",
    [{"url": "redis://me:geheim@host"}, {"password": "geheim"}],
    ids=["in a URL", "under a telling key"],
)
def test_a_secret_is_not_shown(value):
    class Options(BaseModel):
        url: int = 0
        password: int = 0

    with pytest.raises(ConfigError) as caught:
        validate_options(Options, value, "tier x")

    assert "geheim" not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"env": {"LMCACHE_ASYNC_TIERS": '[{"name":"s3","secret_key":"geheim"'}},
        {"env": {"LMCACHE_ASYNC_TIERS": '{"name":"valkey","password":"geheim"}'}},
        {"env": {"LMCACHE_ASYNC_STORE": "{'api-key': geheim"}},
        {"env": {"LMCACHE_EXTRA_CONFIG": '{"token": "geheim"'}},
        {"env": {"LMCACHE_REMOTE_URL": "redis:geheim@host"}},
        {"extra": {"tiers": [{"name": "cpu", "options": ["password", "geheim"]}]}},
        {"extra": {"config_file": {"password": "geheim"}}},
    ],
    ids=["no list", "no list of mappings", "no mapping", "LMCache", "no URL", "a list of options", "no path"],
)
def test_a_secret_in_text_that_cannot_be_parsed_is_not_shown(settings):
    text = message(**settings)

    assert "geheim" not in text
    assert "***" in text


def test_a_long_value_is_cut():
    assert message(extra={"chunk_size": "x" * 1000}).startswith(f"{EXTRA}: chunk_size is 'xxx")
    assert len(message(extra={"chunk_size": "x" * 1000})) < 250


class DiskOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    max_bytes: Size
    direct_io: Flag = True
    mode: Literal["fast", "safe"] = "safe"


def test_options_of_a_tier_become_its_config():
    options = validate_options(DiskOptions, {"path": "/x", "max_bytes": "1GiB", "direct_io": "off"}, "here")

    assert options == DiskOptions(path=Path("/x"), max_bytes=2**30, direct_io=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "max_bytes is missing"),
        ({"max_byte": 1, "max_bytes": 1}, "there is no key max_byte; did you mean max_bytes?"),
        ({"time_out_s": 1, "max_bytes": 1}, "there is no key time_out_s; did you mean timeout_s?"),
        ({"max_bytes": "x"}, "max_bytes is 'x': expected a size in bytes, such as 8GiB, 500MB or 1048576"),
        ({"max_bytes": 1, "mode": "save"}, "mode is 'save': expected 'fast' or 'safe'; did you mean safe?"),
    ],
)
def test_wrong_options_of_a_tier(options, text):
    with pytest.raises(ConfigError) as caught:
        validate_options(DiskOptions, {"path": "/x", **options}, "kv.yaml, line 5: tiers[1] (disk)")

    assert str(caught.value) == f"kv.yaml, line 5: tiers[1] (disk): {text}"
