"""A tier of another distribution, installed, is used by its name."""

import shutil
import sys
from pathlib import Path

import pytest

from lmcache_async.registry import TIERS, Registry
from lmcache_async.testing.rig import Rig
from tests.support.projects import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_tier"
TOKENS = list(range(20))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    install(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "custom_tier"), target)
    return target


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("lmcache_async_sqlite", None)


async def test_an_installed_tier_is_used_by_name_and_survives_a_restart(installed, tmp_path):
    settings = {"tiers": ["cpu", {"name": "sqlite", "path": str(tmp_path / "kv.sqlite")}]}
    rig = Rig()
    async with rig.open(**settings) as engine:
        rig.write(range(20), rig.content(TOKENS))
        report = await engine.store(TOKENS, range(20))
        assert report.stored == 3

    again = Rig()
    async with again.open(**settings) as engine:
        mask = await engine.retrieve(TOKENS, range(40, 60))
        assert mask.all()
        assert (again.read(range(40, 60)) == again.content(TOKENS)).all()
        assert engine.statistics().counts["sqlite.hits"] == 3


def test_the_registry_tells_where_it_came_from(installed):
    plugin = Registry().available(TIERS)["sqlite"]

    assert (plugin.distribution, plugin.bundled) == ("lmcache-async-sqlite", False)
    assert "sqlite" not in Registry().available(TIERS, third_party=False)
