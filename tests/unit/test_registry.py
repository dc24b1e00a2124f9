"""Plug-ins by entry point: listed without an import, imported on use, with instructive error messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmcache_async.errors import ConfigError, MissingDependencyError, UnknownPluginError
from lmcache_async.registry import LAYERS, STAGES, TIERS, Plugin, Registry


class Site:
    """A folder of hand-written distributions, first on the path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def distribution(self, name, tiers=(), *, version="1.0", requires=(), group=TIERS) -> Site:
        metadata = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (metadata / "METADATA").write_text(
            "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires)]) + "\n"
        )
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *tiers]) + "\n")
        return self

    def module(self, name: str, text: str = "class Tier: ...\n") -> Site:
        (self.path / f"{name}.py").write_text(text)
        return self

    def registry(self) -> Registry:
        return Registry([str(self.path)])


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(registry: Registry, name: str, error: type[Exception], group: str = TIERS, **options) -> str:
    with pytest.raises(error) as caught:
        registry.load(group, name, **options)
    return str(caught.value)


def test_available_is_read_from_metadata_without_an_import(site):
    site.distribution("some-tiers", ["a = some_tiers_a:Tier", "b = some_tiers_b:Tier"])
    site.module("some_tiers_a", "raise RuntimeError('imported')\n").module("some_tiers_b")

    registry = site.registry()

    assert registry.available(TIERS) == {
        "a": Plugin("a", "some-tiers", "1.0", "some_tiers_a:Tier"),
        "b": Plugin("b", "some-tiers", "1.0", "some_tiers_b:Tier"),
    }
    assert "some_tiers_b" not in sys.modules
    assert registry.load(TIERS, "b") is sys.modules["some_tiers_b"].Tier


@pytest.mark.parametrize(("group", "kind"), [(STAGES, "stage"), (LAYERS, "layer")])
def test_entry_point_groups_are_separate(site, group, kind):
    site.distribution("others", ["x = others:own"], group=group).module("others", "own = 7\n")

    registry = site.registry()

    assert (list(registry.available(TIERS)), list(registry.available(group))) == ([], ["x"])
    assert registry.load(group, "x") == 7
    assert refusal(registry, "y", UnknownPluginError, group) == f"there is no {kind} y; there are: x"


def test_an_unknown_name_lists_the_names_and_the_nearest(site):
    assert refusal(site.registry(), "cpu", UnknownPluginError) == "there is no tier cpu; there are: none"
    site.distribution("some-tiers", ["disk = x:T", "cpu = x:T"])

    registry = site.registry()

    assert (
        refusal(registry, "dsk", UnknownPluginError)
        == "there is no tier dsk; there are: cpu, disk; did you mean disk?"
    )
    assert refusal(registry, "redis", UnknownPluginError) == "there is no tier redis; there are: cpu, disk"


@pytest.mark.parametrize("name", ["lmcache-async", "LMCache_Async"])
def test_a_bundled_plug_in_takes_precedence_over_another_of_its_name(site, name):
    site.distribution("a-tiers", ["cpu = theirs:Tier"]).distribution(name, ["cpu = ours_module:Tier"])
    site.module("ours_module")

    registry = site.registry()

    assert registry.available(TIERS)["cpu"].distribution == "lmcache-async"
    assert registry.load(TIERS, "cpu") is sys.modules["ours_module"].Tier


def test_two_third_parties_of_one_name_are_refused_when_it_is_used(site):
    site.distribution("one", ["x = one:T", "y = one_y:Tier"]).distribution(
        "two", ["x = two:T"], version="2.0"
    )
    site.module("one_y")

    registry = site.registry()

    assert set(registry.available(TIERS)) == {"x", "y"}
    assert registry.load(TIERS, "y")
    text = refusal(registry, "x", ConfigError)
    assert text in {
        f"the tier x is offered by {both}; uninstall one of them" for both in ("one 1.0 and two 2.0", "two 2.0 and one 1.0")
    }  # fmt: skip


@pytest.mark.parametrize("plugins", [["a = some_tiers:Tier"], []])
def test_a_distribution_hides_a_later_one_of_the_same_name(site, tmp_path, plugins):
    later = tmp_path / "later"
    later.mkdir()
    site.distribution("some-tiers", plugins)
    Site(later).distribution("Some.Tiers", ["a = elsewhere:Tier"], version="0.9")

    found = Registry([str(tmp_path), str(later)]).available(TIERS)

    assert [plugin.version for plugin in found.values()] == ["1.0"] * len(plugins)


def test_third_parties_can_be_switched_off(site):
    site.distribution("lmcache-async", ["cpu = x:T"]).distribution("some-tiers", ["redis = y:T"])

    registry = site.registry()

    assert list(registry.available(TIERS, third_party=False)) == ["cpu"]
    assert refusal(registry, "redis", UnknownPluginError, third_party=False) == (
        "there is no tier redis; there are: cpu; some-tiers has one, but plugins.third_party is off"
    )


@pytest.mark.parametrize(
    ("requires", "install"),
    [
        (['not-there>=6; extra == "valkey"'], "some-tiers[valkey]"),
        (['Not.There ; python_version > "3" and extra == "valkey"'], "some-tiers[valkey]"),
        (['its-other-name; extra == "kv"', 'numpy; extra == "more"'], "some-tiers[kv]"),
        (["numpy"], "not_there"),
        ([], "not_there"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(site, requires, install):
    site.distribution("some-tiers", ["kv = some_tiers:Tier"], requires=requires)
    site.module("some_tiers", "import not_there.sub\n")

    assert refusal(site.registry(), "kv", MissingDependencyError) == (
        f"the tier kv of some-tiers 1.0 needs the package not_there, which is not installed: pip install '{install}'"
    )


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("class Other: ...\n", "module 'some_tiers' has no attribute 'Tier'"),
        ("from json import nothing\n", "cannot import name 'nothing' from 'json'"),
        (None, "No module named 'some_tiers'"),
    ],
)
def test_an_entry_point_without_its_object_is_refused(site, module, why):
    site.distribution("some-tiers", ["a = some_tiers:Tier"])
    if module is not None:
        site.module("some_tiers", module)

    text = refusal(site.registry(), "a", ConfigError)

    assert text.startswith(f"the tier a of some-tiers 1.0 cannot be loaded from some_tiers:Tier: {why}")


def test_a_bug_in_a_plug_in_is_not_hidden(site):
    site.distribution("some-tiers", ["a = some_tiers:Tier"]).module("some_tiers", "1 / 0\n")

    with pytest.raises(ZeroDivisionError):
        site.registry().load(TIERS, "a")


def test_without_a_path_sys_path_is_read(site):
    site.distribution("some-tiers", ["quite-new = some_tiers:Tier"])

    assert Registry().available(TIERS)["quite-new"].distribution == "some-tiers"
