"""`lmcache-async tiers`: installed plug-ins, including broken ones."""

from __future__ import annotations

import json

import pytest

from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry
from tests.cli.site import GOOD, install

BROKEN = {
    "cannot be imported": (
        "import a_package_that_is_not_there\n",
        "needs the package a_package_that_is_not_there",
    ),
    "raises": ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines"),
    "exits": ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    "is not there": ("", "cannot be loaded from"),
    "is no tier": ("Shelf = 3\n", "TypeError: 3 is not a subclass of Tier"),
    "has no options": (f"{GOOD}\nShelf.config_type = 3\n", "TypeError: its options are 3"),
}


def test_every_plug_in_is_listed_with_its_distribution(invoke):
    result = invoke("tiers")

    registry = Registry()
    assert result.exit_code == 0
    for group in (TIERS, LAYERS, STAGES):
        for plugin in registry.available(group).values():
            assert f"  {plugin.name} " in result.stdout
    assert f"lmcache-async {registry.available(TIERS)['cpu'].version}" in result.stdout
    assert "cannot be used" not in result.stdout


def test_a_tier_is_described_with_options_and_capabilities(invoke):
    [entry] = json.loads(invoke("tiers", "disk", "--json").stdout)

    options = {option["name"]: option for option in entry["options"]}
    assert options["path"]["default"] is None
    assert options["path"]["kind"] == "path"
    assert options["max_bytes"]["kind"] == "size"
    assert options["odirect"]["kind"] == "auto | true or false"
    assert options["fsync"]["default"] == "false"
    assert "power failure" in options["fsync"]["help"]
    assert entry["details"]["capabilities"]["persistent"] is True
    assert {"get_many", "scrub"} <= set(entry["details"]["overrides"])


def test_every_bundled_option_has_a_description_and_a_type_and_each_tier_its_capabilities(invoke):
    entries = json.loads(invoke("tiers", "--json").stdout)

    options = [(entry["name"], option) for entry in entries for option in entry["options"]]
    assert len(options) > 100
    for name, option in options:
        words = option["kind"].split(" | ")
        assert option["kind"] != "any", option
        assert all(words), option
        assert len(set(words)) == len(words), option
        assert option["help"] or name == "faults", option
    assert all(entry["details"]["capabilities"] for entry in entries if entry["kind"] == "tier")


def test_a_stage_is_described_with_its_types(invoke):
    [entry] = json.loads(invoke("tiers", "seal", "--json").stdout)

    assert (entry["details"]["takes"], entry["details"]["gives"]) == ("FilledBatch", "SealedBatch")


def test_a_third_party_tier_is_described_like_a_bundled_one(invoke, others):
    install(others, "shelf", {"shelf": "Shelf"}, GOOD)

    [entry] = json.loads(invoke("tiers", "shelf", "--json").stdout)
    text = invoke("tiers", "shelf").stdout

    assert (entry["distribution"], entry["version"]) == ("shelf", "1.0")
    assert entry["summary"] == "Boards on a wall."
    assert entry["details"]["overrides"] == ["remove"]
    assert entry["details"]["capabilities"]["max_concurrency"] == 3
    assert "    colour: text; required\n      Of its boards." in text
    assert "    boards: whole number; default 3\n      How many there are." in text


def test_a_tier_without_a_docstring_has_no_summary(invoke, others):
    install(others, "shelf", {"shelf": "Shelf"}, GOOD.replace('"""Boards on a wall."""', ""))

    [entry] = json.loads(invoke("tiers", "shelf", "--json").stdout)

    assert (entry["problem"], entry["summary"]) == ("", "")


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plug_in_is_reported_and_the_others_are_listed(invoke, others, how):
    module, told = BROKEN[how]
    install(others, "shelf", {"shelf": "Shelf"}, module)

    result = invoke("tiers")

    assert result.exit_code == 0, result.output
    assert told in result.stdout
    assert result.stdout.count("cannot be used: ") == 1
    assert "  disk " in result.stdout


def test_a_missing_package_names_the_extra(invoke, others):
    install(others, "shelf", {"shelf": "Shelf"}, "import boards\n")
    metadata = others / "shelf-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + 'Requires-Dist: boards; extra == "shelf"\n')

    [entry] = json.loads(invoke("tiers", "shelf", "--json").stdout)

    assert entry["problem"].endswith("pip install 'shelf[shelf]'")


def test_an_unknown_name_is_refused_with_the_nearest_one(invoke):
    result = invoke("tiers", "dsk")

    assert result.exit_code == 2
    assert result.stderr == (
        "there is no tier, layer or stage dsk; did you mean disk? (lmcache-async tiers lists all)\n"
    )
