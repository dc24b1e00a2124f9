"""The JSON schema accepts the configurations of the documentation and marks errors at their place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.cli.config import daemon_schema, engine_schema
from lmcache_async.config import load_config
from lmcache_async.errors import ConfigError
from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry
from tests.cli.site import GOOD, install
from tests.wrong_config.cases import DAEMON, ENGINE

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```yaml[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENGINE_FILES = [
    ROOT / "examples/compose/lmcache-async.yaml",
    ROOT / "examples/disaggregated/prefiller.yaml",
    ROOT / "examples/disaggregated/decoder.yaml",
]


def examples() -> list[str]:
    """Return every configuration of the documentation and the examples."""
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages += sorted((ROOT / "plugins").rglob("README.md"))
    blocks = [block for page in pages for block in FENCE.findall(page.read_text(encoding="utf-8"))]
    # The schema does not include LMCache's keys.
    blocks = [block for block in blocks if "\nlocal_cpu:" not in block]
    return blocks + [file.read_text(encoding="utf-8") for file in ENGINE_FILES]


ENGINE_SCHEMA = engine_schema(Registry())
CHECK = jsonschema.Draft202012Validator(ENGINE_SCHEMA)
CHECK_DAEMON = jsonschema.Draft202012Validator(daemon_schema())


def test_the_command_prints_a_valid_schema(invoke):
    for arguments, schema in (((), ENGINE_SCHEMA), (("--daemon",), daemon_schema())):
        printed = json.loads(invoke("config", "schema", *arguments).stdout)

        assert printed == schema
        jsonschema.Draft202012Validator.check_schema(printed)


@pytest.mark.parametrize("text", examples(), ids=lambda text: text.strip().splitlines()[0][:50])
def test_configs_of_the_docs_and_examples_are_valid(text):
    CHECK.validate(yaml.safe_load(text))


def test_every_bundled_tier_except_aliases_has_an_example():
    named = set(re.findall(r"(?:- |name: )(\w+)$|name: (\w+)", "\n".join(examples()), re.MULTILINE))

    assert set(Registry().available(TIERS)) - {"redis"} <= {name for pair in named for name in pair}


def test_the_daemon_config_of_the_docs_is_valid():
    page = (ROOT / "docs/tiers/host.md").read_text(encoding="utf-8")
    [text] = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "max_bytes" in block]

    CHECK_DAEMON.validate(yaml.safe_load(text))


IN_A_SCHEMA = re.compile(
    r"there is no (key|tier|layer|stage) |were removed in version|path is missing"
    r"|expected (a path(,|$)|a size in bytes|'|auto,|text|true or false|a list|a mapping of keys to values$|a user id)"
    r"|(share|tenant|protocol) is .*: expected a name of letters"
)
"""Errors that a schema can express; not constraints between values, contents of files and parts of a URL."""


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (check, text)
        for check, cases in ((CHECK, ENGINE), (CHECK_DAEMON, DAEMON))
        for text, lines in cases
        if any(IN_A_SCHEMA.search(line) for line in lines)
    ],
)
def test_invalid_configs_are_rejected(check, text):
    assert not check.is_valid(yaml.safe_load(text.replace("{dir}", "/dir")))


def test_an_error_is_marked_at_its_place():
    config = yaml.safe_load("tiers:\n- cpu\n- {name: disk, path: /x, max_bytes: 1GiB, fsync: perhaps}")

    [error] = CHECK.iter_errors(config)

    assert list(error.absolute_path) == ["tiers", 1, "fsync"]


def test_each_key_has_its_description():
    disk = ENGINE_SCHEMA["$defs"]["tier-disk"]["properties"]

    assert disk["fsync"]["description"].startswith("Whether a put returns only when")
    assert disk["timeout_s"]["description"].startswith("Longest time of one call")
    assert ENGINE_SCHEMA["$defs"]["ArenaConfig"]["properties"]["max_bytes"]["description"]


def test_the_schema_includes_third_party_plug_ins(others):
    install(others, "shelf", {"shelf": "Shelf"}, GOOD)
    install(others, "gone", {"gone": "Gone"}, "import nothing_like_it\n")
    schema = engine_schema(Registry())
    check = jsonschema.Draft202012Validator(schema)

    registry = Registry()
    assert {f"tier-{name}" for name in registry.available(TIERS)} <= set(schema["$defs"])
    assert {f"layer-{name}" for name in registry.available(LAYERS)} <= set(schema["$defs"])
    assert schema["properties"]["store.stages"]["anyOf"][0]["items"]["enum"] == list(
        registry.available(STAGES)
    )
    assert check.is_valid({"tiers": [{"name": "shelf", "colour": "red"}, {"name": "gone", "x": 1}]})
    assert check.is_valid({"tiers": [{"name": "shelf", "options": {"colour": "red", "boards": 4}}]})
    assert not check.is_valid({"tiers": [{"name": "shelf"}]})
    assert not check.is_valid({"tiers": [{"name": "shelf", "colour": "red", "boards": 0}]})


spellings = st.sampled_from(
    [
        *(0, 1, -1, 1.5, True, False, None, [], ["hash"]),
        *["", "1", "0", "yes", "none", "8GiB", "8G", "x", "a b", ".5", "1e3"],
    ]
)
keys = st.sampled_from([key for key in ENGINE_SCHEMA["properties"] if "." in key and "keys" not in key])


@given(st.dictionaries(keys, spellings, max_size=3))
def test_the_loader_accepts_what_the_schema_accepts(config):
    """Except for constraints between values and for formats that a schema cannot express."""
    formats = "never fit|a size between|expected a number|fraction|a name of letters|name:port|requires tls_cert_file"
    if not CHECK.is_valid(config):
        return
    try:
        load_config(env={}, extra=config)
    except ConfigError as error:
        told = str(error)
    else:
        told = "never fit"

    assert re.search(formats, told)
