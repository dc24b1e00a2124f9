"""Tiers written as in the documentation pass `mypy --strict` in a separate project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLAIN = """
from lmcache_async import Allocate, Buffer, ChunkKey, Tier


class Plain(Tier):
    async def contains(self, key: ChunkKey) -> bool:
        return False

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return None

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        print(self.config.whatever)


def passed_on(tier: Tier) -> Tier:
    return tier
"""
WRONG = """
from my_tiers import FolderConfig, FolderTier

tier = FolderTier(FolderConfig(path="/kv"))
reveal_type(tier.config)
tier.config.pth
FolderTier(3)
"""


def documented(page: str) -> dict[str, str]:
    """The Python files of a page that have these names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Errors of `mypy --strict` for each file, with the project's settings and the cache of `make lint`."""
    folder = tmp_path_factory.mktemp("typed")
    files = documented("docs/write-a-tier.md")
    assert set(files) == {"my_tiers.py", "test_my_tiers.py"}
    [readme] = [text for text in PYTHON.findall((ROOT / "README.md").read_text()) if "(Tier" in text]
    files |= {"readme_tier.py": readme, "plain.py": PLAIN, "wrong.py": WRONG}
    for file in (ROOT / "examples").glob("custom_*/*/*.py"):
        files[file.name] = file.read_text(encoding="utf-8")
    assert {"lmcache_async_sqlite.py", "lmcache_async_zlib.py"} <= set(files)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, sorted(folder.iterdir()))],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert not ran.stderr
    found = dict.fromkeys(files, "")
    for line in ran.stdout.splitlines(keepends=True):
        found[Path(line.partition(":")[0]).name] += line
    return found


def test_documented_tiers_and_examples_pass(errors: dict[str, str]) -> None:
    assert {name: found for name, found in errors.items() if found and name != "wrong.py"} == {}


def test_the_type_of_a_tiers_config_is_known(errors: dict[str, str]) -> None:
    found = errors["wrong.py"]

    assert 'Revealed type is "my_tiers.FolderConfig"' in found
    assert '"FolderConfig" has no attribute "pth"' in found
    assert 'Argument 1 to "FolderTier" has incompatible type "int"; expected "FolderConfig"' in found
