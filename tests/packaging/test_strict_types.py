"""Tiers as the documentation writes them pass `mypy --strict`, as in a project of their owner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def check(folder: Path) -> tuple[int, str]:
    """Run mypy over a folder with our settings, which are strict, and with the cache that `make lint` has filled."""
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, sorted(folder.rglob("*.py")))],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    return ran.returncode, ran.stdout + ran.stderr


def documented(page: str) -> dict[str, str]:
    """The Python files of a page that has their names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL))


def test_documented_tiers_and_examples_pass(tmp_path: Path) -> None:
    files = documented("docs/write-a-tier.md")
    assert set(files) == {"my_tiers.py", "test_my_tiers.py"}
    [readme] = [text for text in PYTHON.findall((ROOT / "README.md").read_text()) if "(Tier" in text]
    files |= {"readme_tier.py": readme, "plain.py": PLAIN}
    for file in (ROOT / "examples").glob("custom_*/*/*.py"):
        files[file.name] = file.read_text(encoding="utf-8")
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    assert {"lmcache_async_sqlite.py", "lmcache_async_zlib.py"} <= set(files)
    assert check(tmp_path) == (0, "")


def test_the_type_of_a_tiers_config_is_known(tmp_path: Path) -> None:
    (tmp_path / "my_tiers.py").write_text(documented("docs/write-a-tier.md")["my_tiers.py"])
    (tmp_path / "use.py").write_text(WRONG)

    code, told = check(tmp_path)

    assert code == 1
    assert 'Revealed type is "my_tiers.FolderConfig"' in told
    assert '"FolderConfig" has no attribute "pth"' in told
    assert 'Argument 1 to "FolderTier" has incompatible type "int"; expected "FolderConfig"' in told
