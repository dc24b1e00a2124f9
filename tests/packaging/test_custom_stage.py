"""Stages of another distribution, installed, are used by their names."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_async.registry import STAGES, Registry
from lmcache_async.testing.rig import Rig
from tests.support.projects import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_stage"
TOKENS = list(range(20))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "custom_stage"), target)
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("lmcache_async_zlib", None)


async def test_installed_stages_stand_in_the_chains_and_spare_the_disk(
    installed: Path, tmp_path: Path
) -> None:
    sizes = {}
    for name, stages in {"plain": ([], []), "small": (["zlib"], ["unzlib"])}.items():
        settings = {
            "store.stages": ["hash", "lookup", "allocate", "device_to_host", "seal", *stages[0], "write"],
            "retrieve.stages": ["hash", "plan", "fetch", *stages[1], "verify", "host_to_device"],
            "tiers": [
                "cpu",
                {"name": "disk", "path": str(tmp_path / name), "max_bytes": "16MiB", "odirect": "auto"},
            ],
        }
        rig = Rig(head_dim=256, slabs=32)
        content = rig.content(TOKENS).round(decimals=1)
        rig.write(range(20), content)
        async with rig.open(**settings) as engine:
            await engine.store(TOKENS, range(20))
            assert await engine.flush(timeout_s=30)
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())

        again = Rig(head_dim=256, slabs=32)
        async with again.open(**settings) as engine:
            mask = await engine.retrieve(TOKENS, range(40, 60))
        assert mask.all()
        assert torch.equal(again.read(range(40, 60)), content)

    assert sizes["small"] < 0.75 * sizes["plain"]


def test_the_registry_tells_where_they_came_from(installed: Path) -> None:
    found = Registry().available(STAGES)

    assert {found[name].distribution for name in ("zlib", "unzlib")} == {"lmcache-async-zlib"}
    assert "zlib" not in Registry().available(STAGES, third_party=False)
