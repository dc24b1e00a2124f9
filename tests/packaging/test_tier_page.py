"""docs/write-a-tier.md alone makes a distribution: its tier is short, passes the conformance suite and is used by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_async.testing.rig import Rig
from tests.support.projects import install, run_tests

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-tier.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
TOKENS = list(range(20))


def write(folder: Path) -> Path:
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install(write(tmp_path_factory.mktemp("source") / "my_tiers"), target)
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("my_tiers", None)


def test_a_whole_tier_has_at_most_thirty_lines() -> None:
    lines = [line for line in FILES["my_tiers.py"].splitlines() if line.strip()]

    assert set(FILES) == {"my_tiers.py", "pyproject.toml", "test_my_tiers.py"}
    assert 10 < len(lines) <= 30


def test_the_pages_tier_passes_the_pages_test(site: Path, tmp_path: Path) -> None:
    run_tests(write(tmp_path / "my_tiers"), site=site)


async def test_the_pages_tier_is_used_by_the_name_that_the_page_gives_it(
    installed: Path, tmp_path: Path
) -> None:
    settings = {"tiers": ["cpu", {"name": "folder", "path": str(tmp_path)}]}
    rig = Rig()
    rig.write(range(20), rig.content(TOKENS))
    async with rig.open(**settings) as engine:
        assert (await engine.store(TOKENS, range(20))).stored == 3
        assert await engine.flush(timeout_s=30)

    again = Rig()
    async with again.open(**settings) as engine:
        assert (await engine.retrieve(TOKENS, range(40, 60))).all()
        assert engine.statistics().counts["folder.hits"] == 3
    assert torch.equal(again.read(range(40, 60)), again.content(TOKENS))
